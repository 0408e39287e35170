"""What the training monitor costs: CPU time of watched steps beside steps of the same bare loop.

Blocks of steps alternate in one process, on one compute thread, with TensorBoard written at every
step; CPU time is the whole process's. The claim: an unprofiled step of the model small at frequency
100 costs at most 1.01 times a bare one. A profiled step is dearer, the more so the smaller its
operators are; how much of that a training feels is up to the frequency. "around nothing" is the
monitor alone, with no step in it.
"""

import tempfile
import time
from functools import partial
from typing import NamedTuple

import torch

import bare_loop
import interleave
from dpprof.experiments.config.naming import Dimensions
from dpprof.measure.monitor import Monitor, TensorBoard, model_flops_per_token
from dpprof.subjects.models.presets import SMALL, TINY
from dpprof.system.console import say
from interleave import MIN_PAIRS, Comparison, measure, tabulate
from script import at_least, describe_place, end, make_parser, publish


class Size(NamedTuple):
    """What a step is of."""

    name: str
    model: Dimensions
    B: int
    T: int

    def __str__(self) -> str:
        return f"{self.name}, B = {self.B}, T = {self.T}"


REAL = Size("small", SMALL, 4, 128)
USUAL, SHORT = Size("tiny", TINY, 8, 128), Size("tiny", TINY, 2, 64)
"""Steps of some 300, 30 and 8 ms."""

STEPS = {1: 20, 10: 20, 50: 50, 100: 100, 500: 500}
"""Steps that are one pair of whole cycles, by frequency."""

BLOCK = 4  # steps from one side to the other

CLAIM = 1.01


class Loop:
    """The bare loop, and a monitor for its steps, of which it profiles one in ``freq``."""

    def __init__(self, size: Size, method: str, freq: int, directory: str) -> None:
        _, of, B, T = size
        torch.manual_seed(0)
        model = bare_loop.LanguageModel(of.vocab_size, of.d_model, of.layers, of.heads, T)
        batch = bare_loop.make_batch(of.vocab_size, B, T)
        flops = model_flops_per_token(model, seq_len=T, layers=of.layers, d_model=of.d_model)
        self.step = bare_loop.make_step(model, method, *batch, noise_multiplier=1.0)
        self.monitor = Monitor(
            flops_profile_freq=freq,
            model_flops_per_token=flops,
            peak_flops_per_s=1e13,
            sinks=[TensorBoard(directory)],
        )
        self._counts = {"samples": B, "tokens": B * T}
        for _ in range(freq + 1):  # from here on values are written
            self.watched()

    def watched(self) -> None:
        """Take a step that the monitor watches."""
        with self.monitor.step(**self._counts):
            self.step()

    def around_nothing(self) -> None:
        """Take no step, and let the monitor watch it."""
        with self.monitor.step(**self._counts):
            pass

    def unprofiled(self) -> float:
        """Take a block of watched steps; CPU seconds of one that is not profiled."""
        taken_s = []
        for _ in range(BLOCK):
            taken_s.append(timed(self.watched, 1)())
            assert self.monitor.metrics is not None
            if not self.monitor.metrics.carried:
                taken_s.pop()
        return sum(taken_s) / len(taken_s)

    def cycles(self, steps: int) -> tuple[float, float]:
        """Take so many watched steps and as many bare ones, in turn; CPU seconds of one each."""
        watched_s = bare_s = 0.0
        for start in range(0, steps, BLOCK):
            block = min(BLOCK, steps - start)
            watched_s += timed(self.watched, block)() * block
            bare_s += timed(self.step, block)() * block
        return watched_s / steps, bare_s / steps


timed = partial(interleave.timed, clock=time.process_time)


def compare_unprofiled(pairs: int, directory: str) -> list[Comparison]:
    """Put unprofiled steps beside bare ones, and bare ones beside themselves."""
    rows = []
    for size in (REAL, USUAL):
        loop = Loop(size, "standard", 100, directory)
        bare = timed(loop.step, BLOCK)
        rows += [
            measure(f"bare / bare, {size}", bare, bare, pairs // 2, say),
            measure(f"unprofiled / bare, {size}", loop.unprofiled, bare, pairs, say),
        ]
    nothing = timed(loop.around_nothing, 100)
    return [*rows, measure(f"around nothing / bare, {size}", nothing, bare, MIN_PAIRS, say)]


def compare_profiled(pairs: int, directory: str) -> list[Comparison]:
    """Put profiled steps beside bare ones."""
    rows = []
    for size in (USUAL, SHORT):
        for method in bare_loop.METHODS:
            loop = Loop(size, method, 1, directory)
            name = f"profiled / bare, {method}, {size}"
            rows.append(measure(name, timed(loop.watched, 2), timed(loop.step, 2), pairs, say))
    return rows


def compare_frequencies(pairs: int, directory: str) -> list[Comparison]:
    """Put whole cycles, of unprofiled steps and a profiled one, beside as many bare steps."""
    rows = []
    for freq, steps in STEPS.items():
        loop = Loop(SHORT, "standard", freq, directory)
        cycles = [loop.cycles(steps) for _ in range(pairs)]
        rows.append(Comparison(f"frequency {freq} / bare", cycles))
        say(f"{rows[-1].name}: {rows[-1].ratio:.3f}")
    return rows


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", **at_least(2 * MIN_PAIRS, 60))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        unprofiled = compare_unprofiled(arguments.pairs, directory)
        profiled = compare_profiled(MIN_PAIRS, directory)
        frequencies = compare_frequencies(MIN_PAIRS, directory)
    text = "\n\n".join(
        [
            f"{describe_place('torch', 'opacus', 'tensorboard', threads=1)}; AdamW.",
            "An unprofiled step at frequency 100, standard:",
            tabulate(unprofiled, "ms", 1e3),
            "A profiled step:",
            tabulate(profiled, "ms", 1e3),
            f"All steps, standard, {SHORT}, where the monitor weighs most:",
            tabulate(frequencies, "ms", 1e3),
        ]
    )
    publish(__doc__, text, arguments.output)
    row = unprofiled[1]
    end("beyond its claim", [f"{row.name}, {row.ratio:.3f}"] if row.ratio > CLAIM else [])


if __name__ == "__main__":
    main()
