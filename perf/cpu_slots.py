"""Do slots of the processor harm what they measure? One measurement alone, and beside the others.

A round measures an experiment in one slot of an idle processor, and then in every slot at once;
the pair is of the same slot. The first row is the one alone beside itself, in other rounds: what
noise makes of a ratio. Slots share caches and memory, so what moves many bytes suffers first:
look at the experiments that you mean to measure.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dpprof.analysis.statistics import noise_floor
from dpprof.launch.cpu_slots import count_cpu_slots
from dpprof.records.result import Result, read_result
from dpprof.system.console import say
from dpprof.system.hardware import available_cores, cpu_name
from interleave import MIN_PAIRS, Comparison, tabulate
from script import at_least

EXPERIMENT = (
    *("--model=tiny", "--method=standard", "--batch-size=8", "--seq-len=128", "--device=cpu"),
    *("--warmup-steps=5", "--timed-steps=60"),
)
PROFILE = Path(__file__).parents[1] / "workflow" / "scripts" / "profile.py"


def start(output: Path, slots: int, options: list[str]) -> subprocess.Popen[bytes]:
    """Start a measurement in a slot, with locks of its own folder."""
    settings = {"DPPROF_LOCK_DIR": str(output.parent), "DPPROF_CPU_SLOTS": str(slots)}
    return subprocess.Popen(
        [sys.executable, str(PROFILE), *options, f"--output={output}", f"--log={output}.log"],
        env=os.environ | settings,
        stderr=subprocess.DEVNULL,
    )


def measure(folder: Path, number: int, slots: int, options: list[str]) -> list[Result]:
    """Measure in a number of slots at once."""
    outputs = [folder / f"{position}.json" for position in range(number)]
    running = [start(output, slots, options) for output in outputs]
    ended = [process.wait() for process in running]
    if any(ended):
        sys.exit("a measurement wrote no result")
    return [read_result(output) for output in outputs]


def step_s(result: Result) -> float:
    """Return the median time of a measured step."""
    if result.time is None or result.time.median_s is None:
        sys.exit(f"nothing was timed: {result.outcome}, {result.error}")
    return result.time.median_s


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="options after -- are an experiment's, in place of tiny in float32",
    )
    parser.add_argument("--slots", default="2", help="into how many slots (default: 2)")
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, 12))
    parser.add_argument("experiment", nargs="*", help="options of dpprof profile")
    arguments = parser.parse_args()
    slots = count_cpu_slots(arguments.slots)
    if slots == 1:
        parser.error("--slots: 1 is not allowed; one slot is beside no other")
    options = arguments.experiment or list(EXPERIMENT)
    alone: list[float] = []
    beside: list[float] = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as name:
            (one,) = measure(Path(name), 1, slots, options)
            cores = one.device["pinned_to"]
            every = measure(Path(name), slots, slots, options)
        same = next(result for result in every if result.device["pinned_to"] == cores)
        alone.append(step_s(one))
        beside.append(step_s(same))
        say(f"[{number + 1}/{arguments.rounds}] beside / alone {beside[-1] / alone[-1]:.3f}")
    floor = noise_floor([alone], (len(alone), len(alone)))
    print(f"{cpu_name()}, {available_cores()} cores in {slots} slots; {' '.join(options)}")
    rows = [
        Comparison("alone / alone, next round", tuple(alone[1:]), tuple(alone[:-1])),
        Comparison(f"beside {slots - 1} / alone", tuple(beside), tuple(alone)),
    ]
    print(tabulate(rows, "ms", 1e3))
    ratio = statistics.median(beside) / statistics.median(alone)
    told = "unknown" if floor is None else f"{floor:.1%}"
    print(f"Slots change the median step by {ratio - 1:+.1%}; the noise floor is {told}.")


if __name__ == "__main__":
    main()
