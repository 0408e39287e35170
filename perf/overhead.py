"""Does dpprof change what it measures? Steps of ``clean`` beside steps of a bare loop.

Both train in one process, a step of the one, a step of the other, so that what slows the
machine for a moment slows both. A process gives one pair of medians; the ratio and its
interval are over processes. The first row is the bare loop beside another of itself: what
the machine's noise alone makes of a ratio.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch

import bare_loop
from dpprof.experiments.launch.worker_report import PhaseMark
from dpprof.measure.devices.selection import open_device
from dpprof.subjects.models.presets import TINY
from dpprof.system.console import say
from interleave import MIN_PAIRS, Comparison, Side, conclude, measure, prepare, timed
from script import at_least, describe_place, make_parser

ROWS = {
    "bare / bare, standard": ("bare", "standard"),
    "clean / bare, standard": ("clean", "standard"),
    "clean / bare, opacus-hooks": ("clean", "opacus-hooks"),
    "clean / bare, opacus-ghost": ("clean", "opacus-ghost"),
}
BATCH_SIZE, SEQ_LEN = 8, 128
WARMUP_STEPS, STEPS = 3, 40
CLAIM = 1.05
"""The upper end of every interval of clean over bare must lie below this."""


def bare_side(method: str) -> Side:
    """Build a bare loop; a call runs one step and returns its seconds."""
    torch.manual_seed(0)
    model = bare_loop.LanguageModel(TINY.vocab_size, TINY.d_model, TINY.layers, TINY.heads, SEQ_LEN)
    batch = bare_loop.make_batch(TINY.vocab_size, BATCH_SIZE, SEQ_LEN)
    return timed(bare_loop.make_step(model, method, *batch, noise_multiplier=1.0))


def clean_side(method: str) -> Side:
    """Build what ``clean`` times; a call runs one step its way and returns its seconds."""
    device = open_device("cpu")
    training = prepare(
        {"model": "tiny", "method": method, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}
    )
    with tempfile.TemporaryFile() as file:
        mark = PhaseMark(file.fileno())

    def run() -> None:
        training.step.run(training.batch, mark.enter)

    return lambda: device.time(run, 1)[0]


def measure_here(name: str) -> Comparison:
    """Measure one row in this process, step by step."""
    kind, method = ROWS[name]
    side = {"bare": bare_side, "clean": clean_side}[kind](method)
    base = bare_side(method)
    for _ in range(WARMUP_STEPS):
        side()
        base()
    return measure(name, side, base, STEPS)


def measure_in_process(name: str, threads: int) -> tuple[float, float]:
    """Measure one row in a fresh process; returns the medians of both sides, in seconds."""
    settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--row", name],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    value, base = json.loads(done.stdout)
    return value, base


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--processes", **at_least(MIN_PAIRS, 12))
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads; one is the least noisy"
    )
    parser.add_argument("--row", choices=ROWS, help="measure this row here and print two medians")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure_here(arguments.row).medians))
        return
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}
    for process in range(arguments.processes):
        for name, measured in pairs.items():
            measured.append(measure_in_process(name, arguments.threads))
            value, base = measured[-1]
            say(f"[{process + 1}/{arguments.processes}] {name}: {value / base:.3f}")
    rows = [Comparison(name, measured) for name, measured in pairs.items()]
    place = describe_place("torch", "opacus", threads=arguments.threads)
    place += f"; {STEPS} steps a process, tiny, B = {BATCH_SIZE}, T = {SEQ_LEN}, AdamW"
    conclude(__doc__, place, rows, arguments.output, CLAIM)


if __name__ == "__main__":
    main()
