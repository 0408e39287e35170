"""What does a run cost beyond its steps? Whole runs of ``dpprof profile`` beside a bare import.

The bare import is ``python -c "import torch, opacus"``, with which every program of Opacus begins.
A run is the supervisor and its worker, from nothing to the JSON, of two steps of the model tiny:
nothing is subtracted for these. A round is one bare import, another, and one run of each method;
the ratio is within a round. All is CPU time, user and system, of one thread, so that what else
keeps the machine busy counts little.
"""

import argparse
import datetime as dt
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from dpprof.records.provenance import package_versions
from dpprof.spec import registry
from dpprof.system.console import say
from dpprof.system.hardware import available_cores, cpu_name
from dpprof.system.paths import PACKAGE
from interleave import MIN_PAIRS, Comparison, tabulate

BARE = "import torch, opacus"
RUN = "from dpprof.cli.main import main; main()"
STEPS = 2
CLAIM = 1.3
"""The upper end of every interval of a run over a bare import must lie below this."""


def cpu_s(code: str, *arguments: str) -> float:
    """Run Python code in a process of its own; returns the CPU seconds of it and its children."""
    before = _children_s()
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return _children_s() - before


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_cpu_s(method: str) -> float:
    """Run the method's experiment and return the CPU seconds.

    Raises:
        RuntimeError: The experiment ended in another way than ok.
    """
    options = {"model": "tiny", "method": method, "batch-size": 2, "seq-len": 16, "device": "cpu"}
    options |= {"warmup-steps": 1, "timed-steps": STEPS - 1, "cpu-threads": 1}
    options["noise-multiplier"] = 0.1  # more is too much for a batch of 2 of opacus-adaptive
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "run.json"), Path(folder, "run.log")
        options |= {"output": output, "log": log}
        given = (text for name, value in options.items() for text in (f"--{name}", str(value)))
        found = cpu_s(RUN, "profile", *given)
        outcome = json.loads(output.read_bytes())["outcome"]
    if outcome != "ok":
        raise RuntimeError(f"the run of {method} ended as {outcome}")
    return found


def compare(methods: list[str], rounds: int) -> list[Comparison]:
    """Measure every method in each round; returns a row each, after the bare import's."""
    bare: list[float] = []
    runs: dict[str, list[float]] = {name: [] for name in ("bare", *methods)}
    for number in range(1, rounds + 1):
        bare.append(cpu_s(BARE))
        for name, values in runs.items():
            values.append(cpu_s(BARE) if name == "bare" else run_cpu_s(name))
            say(f"[{number}/{rounds}] {name}: {values[-1] / bare[-1]:.2f}")
    return [Comparison(f"{name} / bare", tuple(v), tuple(bare)) for name, v in runs.items()]


def describe_place() -> str:
    """Say when, where and with what a table was measured."""
    versions = package_versions(("torch", "opacus"))
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    cpu = f"{cpu_name()}, {available_cores()} core(s)"
    return f"Measured on {dt.datetime.now(dt.UTC).date()}: {cpu}; {packages}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--method", nargs="+", choices=registry.names("methods"), metavar="METHOD")
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    if arguments.rounds < MIN_PAIRS:
        parser.error(f"--rounds: {arguments.rounds} is not allowed; at least {MIN_PAIRS}")
    rows = compare(arguments.method or registry.names("methods"), arguments.rounds)
    table = tabulate(rows, "s")
    print(table)
    if arguments.output:
        steps = f"{STEPS} steps of tiny, B = 2, T = 16, instrument clean"
        text = f"{__doc__}\n{describe_place()}; {steps}.\n\n{table}\n"
        arguments.output.write_text(text, encoding="utf-8")
    beyond = [row.name for row in rows[1:] if row.interval.high >= CLAIM]
    if beyond:
        sys.exit(f"not below {CLAIM}: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
