"""What does it take to predict rank 0 of 64? Whole commands beside ``import torch, opacus``.

The command is ``dpprof estimate`` of Llama-3.1-8B at 4,096 tokens on H100s under FSDP2, from
nothing to the JSON. A round is one bare import, another, and one command for each method; the ratio
is within a round, in CPU time, user and system, of all processes. Resident memory is that of the
largest process.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

from cheap_runs import BARE, RUN
from dpprof.system.console import say
from dpprof.system.paths import PACKAGE
from interleave import MIN_PAIRS, Comparison, tabulate
from script import at_least, describe_place, end, make_parser, publish

METHODS = ("standard", "flash", "flash-bk")
OPTIONS = {
    "model": "hf:llama-3.1-8b",
    "batch-size": 1,
    "seq-len": 4096,
    "dtype": "bfloat16",
    "target": "h100",
    "parallel": "kind=fsdp,world_size=64",
}
MOST_IMPORTS = 20
"""The upper end of every interval must lie below this."""

MOST_BYTES = 2 * 2**30


class Used(NamedTuple):
    """What a process and its children used."""

    cpu_s: float
    resident_bytes: int


def use(code: str, *arguments: str) -> Used:
    """Run Python code in a process of its own.

    Raises:
        RuntimeError: It failed.
    """
    with tempfile.TemporaryDirectory() as folder:  # where results go
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return Used(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def predict(method: str) -> Used:
    """Predict rank 0 with a method."""
    given = (text for name, value in OPTIONS.items() for text in (f"--{name}", str(value)))
    return use(RUN, "estimate", "--method", method, *given)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, MIN_PAIRS))
    arguments = parser.parse_args()
    bare: list[float] = []
    found: dict[str, list[Used]] = {name: [] for name in ("bare", *METHODS)}
    for number in range(1, arguments.rounds + 1):
        bare.append(use(BARE).cpu_s)
        for name, values in found.items():
            values.append(use(BARE) if name == "bare" else predict(name))
            say(f"[{number}/{arguments.rounds}] {name}: {values[-1].cpu_s / bare[-1]:.2f}")
    rows = [
        Comparison(f"{name} / bare", tuple(one.cpu_s for one in used), tuple(bare))
        for name, used in found.items()
    ]
    resident = {name: max(one.resident_bytes for one in used) for name, used in found.items()}
    sizes = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in resident.items())
    text = f"{tabulate(rows, 's')}\n\nLargest process: {sizes}."
    place = f"{describe_place('torch', 'opacus')}; {json.dumps(OPTIONS)}."
    publish(__doc__, f"{place}\n\n{text}", arguments.output, printed=text)
    beyond = [row.name for row in rows[1:] if row.interval.high >= MOST_IMPORTS]
    beyond += [name for name, size in resident.items() if size >= MOST_BYTES]
    end(f"beyond {MOST_IMPORTS} imports or {MOST_BYTES:,} bytes", beyond)


if __name__ == "__main__":
    main()
