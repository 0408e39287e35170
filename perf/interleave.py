"""Two things measured side by side, A B A B ..., and the ratio of the two.

What drifts on a machine drifts under both, and a pair is resampled as one. A side is
anything that returns one number: a whole process, or a step of a running one.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpprof.experiments.config.experiment import Experiment
from dpprof.results.analysis.statistics import Interval, median_interval
from dpprof.subjects.setup import Training, import_method, set_up
from script import end, lay_out, publish

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
        interval = median_interval([value / base for value, base in self.pairs])
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


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    warmup: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Let any number of sides take turns, A B C A B C ..., and return what each measured.

    The first rounds warm up, and do not count; ``tell`` gets a line after each of the others.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 - warmup, rounds + 1):
        for name, side in sides.items():
            value = side()
            if number > 0:
                taken[name].append(value)
        if number > 0:
            tell(f"{number} of {rounds} rounds")
    return taken


def compare(taken: Mapping[str, Sequence[float]], base: str, of: str = "") -> list[Comparison]:
    """Put all that took turns beside one of them."""
    return [
        Comparison(f"{of}{name} / {base}", list(zip(values, taken[base], strict=True)))
        for name, values in taken.items()
        if name != base
    ]


def tabulate(comparisons: Iterable[Comparison], unit: str, scale: float = 1.0) -> str:
    """Lay comparisons out as one table; 1 as it was measured is ``scale`` of the unit."""
    rows = []
    for row in comparisons:
        low, high = row.interval
        cells = [f"{median * scale:.2f}" for median in row.medians] + [f"{row.ratio:.3f}"]
        rows.append([row.name, *cells, f"{low:.3f} to {high:.3f}", len(row.pairs)])
    heads = ("A / B", f"A, median ({unit}):", f"B, median ({unit}):", "ratio:")
    return "\n".join(lay_out((*heads, "95 % interval:", "pairs:"), rows))


def conclude(
    doc: str | None, place: str, rows: Sequence[Comparison], output: Path | None, claim: float
) -> None:
    """Publish rows of seconds, and exit where the interval of one does not lie below a claim."""
    table = tabulate(rows, "ms", 1e3)
    publish(doc, f"{place}.\n\n{table}", output, printed=table)
    end(f"not below {claim}", [row.name for row in rows if row.interval.high >= claim])
