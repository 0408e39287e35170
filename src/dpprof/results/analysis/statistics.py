"""Statistics over a few processes: medians, intervals, and tests for a difference.

The unit is a process. One number represents it: the median of its steps. Steps of one process are
not independent samples, because they share its memory layout, clocks and load from other
processes. So everything here resamples processes.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 2_000
_SEED = 0  # a fixed seed for resampling, so that the same numbers give the same interval
NO_DIFFERENCE = "no difference detected"


def _stats() -> Any:
    """Import ``scipy.stats`` where it is needed: it takes as long as all else that advice does."""
    return importlib.import_module("scipy.stats")


class Interval(NamedTuple):
    """Bounds of an interval."""

    low: float
    high: float


class Comparison(NamedTuple):
    """The ratio of two groups of processes."""

    ratio: float
    interval: Interval | None  # bootstrap interval of the ratio; None where a group has one process
    p_value: float | None  # two-sided Mann-Whitney p-value; None where a group has one process
    floor: float | None  # how far from 1 the ratio must be to count, as a share; None if unknown
    verdict: str | None  # larger, smaller or `NO_DIFFERENCE`; None if the noise is unknown


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the bootstrap interval of the median over processes (percentile method, 95 %).

    For up to five processes this is their range. It covers the true median with a probability of
    at most ``attainable_coverage``. None for fewer than two processes.
    """
    return _bootstrap((values,), np.median)


def attainable_coverage(count: int) -> float:
    """Return the probability that the range of ``count`` processes covers the true median.

    It is ``1 - 2^(1 - n)``: the range misses the median only if all processes lie on one side of
    it. No interval from these processes does better: 75 % from three, 94 % from five.
    """
    return 1 - 2.0 ** (1 - count)


def can_differ(count: int, base_count: int) -> bool:
    """Return whether so many processes on two sides can reach a Mann-Whitney p-value below 5 %.

    Four on each side can, three cannot: their complete separation has p = 10 %.
    """
    return 2 / math.comb(count + base_count, base_count) < 1 - CONFIDENCE


def noise_floor(groups: Iterable[Sequence[float]], counts: tuple[int, int]) -> float | None:
    """Return the noise floor: how far the ratio of two medians lies from 1 by noise alone (A/A).

    Processes of one group differ by noise only. The difference of two of their logarithms has
    twice the variance of the noise. Groups of ``counts`` processes are drawn from such
    differences. 95 % of their ratios lie within the floor.

    Args:
        groups: One number per process, one group per experiment; groups of similar noise.
        counts: The numbers of processes on the two sides of the comparison.

    Returns:
        A share, such as 0.03 for 3 %; None where no group has two processes.
    """
    differences = [
        math.log(value / other) for group in groups for value, other in combinations(group, 2)
    ]
    if not differences:
        return None
    noise = np.array([*differences, *(-d for d in differences)]) / math.sqrt(2)
    draw = np.random.default_rng(_SEED)
    sides = [np.median(draw.choice(noise, (_RESAMPLES, count)), axis=1) for count in counts]
    return math.expm1(float(np.quantile(np.abs(sides[0] - sides[1]), CONFIDENCE)))


def compare(values: Sequence[float], base: Sequence[float], floor: float | None) -> Comparison:
    """Compare two groups of processes, with regard to the noise.

    A difference counts if it exceeds the noise floor and has a Mann-Whitney p-value below 5 %. The
    p-value counts only where the groups are large enough to reach 5 %. ``floor`` is the result of
    ``noise_floor`` for groups of these sizes.
    """
    p_value = None
    if min(len(values), len(base)) > 1:  # exact up to eight values a side
        mann_whitney = _stats().mannwhitneyu(values, base, alternative="two-sided")
        p_value = float(mann_whitney.pvalue)
    ratio = float(np.median(values) / np.median(base))
    verdict = None
    if floor is not None:
        differs = max(ratio, 1 / ratio) > 1 + floor
        if p_value is not None and can_differ(len(values), len(base)):
            differs &= p_value < 1 - CONFIDENCE
        verdict = ("larger" if ratio > 1 else "smaller") if differs else NO_DIFFERENCE
    interval = _bootstrap(
        (values, base),
        lambda values, base, axis: np.median(values, axis=axis) / np.median(base, axis=axis),
    )
    return Comparison(ratio, interval, p_value, floor, verdict)


def _bootstrap(
    samples: Sequence[Sequence[float]], statistic: Callable[..., Any]
) -> Interval | None:
    """Return the interval of a statistic; None where a sample has one value, without a spread."""
    if min(map(len, samples)) <= 1:
        return None
    bounds = _stats().bootstrap(
        samples,
        statistic,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    low, high = bounds.confidence_interval
    return Interval(float(low), float(high))
