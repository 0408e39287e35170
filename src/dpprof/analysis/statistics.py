"""What can be said from a few processes: medians, intervals, and whether two differ.

The unit is a process, which one number stands for (the median of its steps). Steps of one
process are no independent samples: what a process got of memory layout, clocks and
neighbours, all its steps share. So everything here resamples processes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
_RESAMPLES = 2_000
_SEED = 0
"""Resampling is random, a report must not be: the same numbers give the same interval."""

NO_DIFFERENCE = "no difference detected"


class Interval(NamedTuple):
    """Bounds of an interval."""

    low: float
    high: float


class Comparison(NamedTuple):
    """Two groups of processes, one over the other."""

    ratio: float
    interval: Interval | None
    """Bootstrap interval of the ratio; None where a group is of one process."""

    p_value: float | None
    """Mann-Whitney, two-sided; None where a group is of one process."""

    floor: float | None
    """By how much, as a share, the ratio must differ from 1 to count; None if unknown."""

    verdict: str | None
    """``larger``, ``smaller``, ``no difference detected``; None if nothing can be said."""


def median_interval(values: Sequence[float]) -> Interval | None:
    """Bootstrap the median over processes (percentile method, 95 %).

    Up to five processes this is their range, which covers the true median with the
    probability of ``attainable_coverage`` at most. None for fewer than two.
    """
    if len(values) < 2:  # noqa: PLR2004 (one value has no spread)
        return None
    return _bootstrap((values,), np.median)


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Bootstrap the ratio of two medians over processes (percentile method, 95 %).

    None where a side is of one process, whose spread is unknown.
    """
    if min(len(values), len(base)) < 2:  # noqa: PLR2004 (one value has no spread)
        return None
    return _bootstrap(
        (values, base),
        lambda one, other, axis: np.median(one, axis=axis) / np.median(other, axis=axis),
    )


def attainable_coverage(count: int) -> float:
    """Return how probably the range of so many processes covers the true median.

    ``1 - 2^(1 - n)``: it does not only if all lie on one side. No interval from these
    processes alone does better: 75 % from three, 94 % from five.
    """
    return 1 - 2.0 ** (1 - count)


def mann_whitney(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Whitney U test; exact up to eight a side."""
    return float(stats.mannwhitneyu(values, base, alternative="two-sided").pvalue)


def noise_floor(groups: Iterable[Sequence[float]], counts: tuple[int, int]) -> float | None:
    """Say how far from 1 the ratio of two medians lies although nothing differs (A/A).

    Processes of the same group differ by noise alone, and so do logarithms of two of
    them: by noise of twice the variance. Groups of ``counts`` processes are drawn from
    such differences, and the floor is what 95 % of their ratios stay within.

    Args:
        groups: Numbers per process, a group for each experiment; comparable in noise.
        counts: How many processes the two sides of the comparison have.

    Returns:
        A share, such as 0.03 for 3 %; None where no group has two processes.
    """
    differences = [
        math.log(one / other) for group in groups for one, other in combinations(group, 2)
    ]
    if not differences:
        return None
    noise = np.array([*differences, *(-d for d in differences)]) / math.sqrt(2)
    draw = np.random.default_rng(_SEED)
    sides = [np.median(draw.choice(noise, (_RESAMPLES, count)), axis=1) for count in counts]
    return math.expm1(float(np.quantile(np.abs(sides[0] - sides[1]), CONFIDENCE)))


def compare(values: Sequence[float], base: Sequence[float], floor: float | None) -> Comparison:
    """Compare two groups of processes, and say only what the noise lets one say.

    A difference is one that exceeds the noise floor and, where the groups are large
    enough for the test to reach it, has a Mann-Whitney p-value below 5 %.

    Args:
        values: One positive number per process.
        base: The same of what it is compared with.
        floor: What ``noise_floor`` returned for groups of these sizes.
    """
    ratio = float(np.median(values) / np.median(base))
    test = min(len(values), len(base)) > 1
    p_value = mann_whitney(values, base) if test else None
    verdict = None
    if floor is not None:
        reachable = 2 / math.comb(len(values) + len(base), len(base)) < 1 - CONFIDENCE
        differs = max(ratio, 1 / ratio) > 1 + floor
        if reachable and p_value is not None:
            differs &= p_value < 1 - CONFIDENCE
        verdict = ("larger" if ratio > 1 else "smaller") if differs else NO_DIFFERENCE
    return Comparison(ratio, ratio_interval(values, base), p_value, floor, verdict)


def _bootstrap(samples: tuple[Sequence[float], ...], statistic: Callable[..., Any]) -> Interval:
    found = stats.bootstrap(
        samples,
        statistic,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))
