"""What scripts here share: options, processes, the place of a measurement, where a text goes."""

import argparse
import datetime as dt
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.records.provenance import package_versions
from dpprof.experiments.records.terms import Phase
from dpprof.system.hardware import available_cores, cpu_name

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import torch, opacus"
"""What every program of Opacus begins with, and costs of processes are compared with."""


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser from a script's docstring, with the option ``--output``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="a Markdown file for the text")
    return parser


def at_least(least: int, default: int) -> dict[str, Any]:
    """Describe an option: a whole number, not below a limit."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is not allowed; at least {least}")
        return number

    return {"type": read, "default": default, "help": f"at least {least} (default: {default})"}


class Cost(NamedTuple):
    """What a process and its children took."""

    cpu_s: float
    peak_mib: float  # the largest resident memory of one process


_LAUNCHER = """
import os, sys
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(process, 0)
print()
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""
"""A process starts with the peak of the one that starts it (Linux), so that must be a small one."""


def run(command: Sequence[str], folder: Path) -> Cost:
    """Run Python with these arguments in a folder, without its output.

    Raises:
        RuntimeError: It failed; the message has the end of what it said.
    """
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    launched = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, sys.executable, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        check=True,
    )
    said, _, told = launched.stdout.strip().rpartition("\n")
    status, cpu_s, peak_mib = told.split()
    if status != "0":
        raise RuntimeError(f"{' '.join(command)} ended with {status}: {said.strip()[-2000:]}")
    return Cost(float(cpu_s), float(peak_mib))


def describe_place(*packages: str, threads: int | None = None) -> str:
    """Say when, where and with what something was measured."""
    installed = package_versions(packages).items()
    versions = ", ".join(f"{name} {version}" for name, version in installed)
    computing = "" if threads is None else f", {threads} compute thread(s)"
    cpu = f"{cpu_name()}, {available_cores()} core(s){computing}"
    return f"Measured on {dt.datetime.now(dt.UTC).date()}: {cpu}; {versions}"


def publish(doc: str | None, text: str, output: Path | None, printed: str | None = None) -> None:
    """Print a text, or a part of it, and write it under the script's docstring."""
    sys.stdout.write(f"{text if printed is None else printed}\n")
    if output is not None:
        output.write_text(f"{doc}\n{text}\n", encoding="utf-8")


def lay_out(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lay out a table in Markdown; a head with a colon at its end is of a column aligned right."""
    rules = ["---:" if head.endswith(":") else "---" for head in heads]
    names = [head.removesuffix(":") for head in heads]
    return [f"| {' | '.join(map(str, cells))} |" for cells in (names, rules, *rows)]


def end(claim: str, missed: Sequence[str]) -> None:
    """Exit with what misses a claim, if anything does."""
    if missed:
        sys.exit(f"{claim}: {', '.join(missed)}")


def ignore(_phase: Phase) -> None:
    """Do nothing as a phase begins."""
