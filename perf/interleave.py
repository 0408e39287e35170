"""Two things measured side by side, A B A B ..., and the ratio of the two.

What drifts on a machine drifts under both, and a pair is resampled as one. A side is
anything that returns one number: a whole process, or a step of a running one.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpprof.experiments.config.experiment import Experiment
from dpprof.results.analysis.statistics import Interval, median_intervals
from dpprof.subjects.setup import Training, import_method, set_up
from script import lay_out

Side = Callable[[], float]

MIN_PAIRS = 10  # fewer pairs support no claim


@dataclass(frozen=True)
class Comparison:
    """Pairs of numbers, one of each side, measured one after the other."""

    name: str
    pairs: Sequence[tuple[float, float]]

    @property
    def medians(self) -> list[float]:
        """The median of each side."""
        return [statistics.median(side) for side in zip(*self.pairs, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the pairs' ratios."""
        return statistics.median(value / base for value, base in self.pairs)

    @property
    def interval(self) -> Interval:
        """95 % bootstrap interval of that median, over pairs."""
        (interval,) = median_intervals([[value / base for value, base in self.pairs]])
        assert interval is not None
        return interval


def prepare(fields: Mapping[str, Any]) -> Training:
    """Set an experiment up on this processor, in whatever modes are active."""
    experiment = Experiment.model_validate({**fields, "device": "cpu"})
    return set_up(experiment, import_method(experiment), torch.device("cpu"), lambda *_: None)


def timed(
    run: Callable[[], object], steps: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Side:
    """Make a side of something that takes a step: seconds of one, over so many."""

    def side() -> float:
        start = clock()
        for _ in range(steps):
            run()
        return (clock() - start) / steps

    return side


def measure(
    name: str, side: Side, base: Side, pairs: int, tell: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Measure a side and what it is compared with in turn; ``tell`` gets a line after each pair.

    Raises:
        ValueError: There would be fewer than ``MIN_PAIRS`` pairs.
    """
    if pairs < MIN_PAIRS:
        raise ValueError(f"pairs: {pairs} is not allowed; it must be at least {MIN_PAIRS}")
    measured = []
    for pair in range(1, pairs + 1):
        value, beside = side(), base()
        measured.append((value, beside))
        tell(f"{name}: pair {pair} of {pairs}, ratio {value / beside:.3f}")
    return Comparison(name, measured)


def tabulate(comparisons: Iterable[Comparison], unit: str, scale: float = 1.0) -> str:
    """Lay comparisons out as one table; 1 as it was measured is ``scale`` of the unit."""
    rows = []
    for row in comparisons:
        low, high = row.interval
        cells = [f"{median * scale:.2f}" for median in row.medians] + [f"{row.ratio:.3f}"]
        rows.append([row.name, *cells, f"{low:.3f} to {high:.3f}", len(row.pairs)])
    heads = ("A / B", f"A, median ({unit}):", f"B, median ({unit}):", "ratio:")
    return "\n".join(lay_out((*heads, "95 % interval:", "pairs:"), rows))
