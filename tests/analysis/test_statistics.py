"""Statistics against known answers, and against real step times of equal experiments."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpprof.results.analysis.statistics import (
    NO_DIFFERENCE,
    attainable_coverage,
    compare,
    median_interval,
    noise_floor,
)

REAL = np.loadtxt(Path(__file__).parent / "aa_step_s.csv", skiprows=1)
"""Medians of 40 processes of one experiment; the file says which."""

REPLICATES = 10

slow = pytest.mark.slow


def synthetic(draw: np.random.Generator, count: int, spread: float = 0.05) -> np.ndarray:
    """Positive numbers with median 1."""
    return np.exp(draw.normal(0, spread, count))


@pytest.mark.parametrize("count", [pytest.param(6, marks=slow), 10, pytest.param(20, marks=slow)])
def test_an_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    draw = np.random.default_rng(0)
    intervals = [median_interval(synthetic(draw, count)) for _ in range(400)]
    covered = np.mean([low <= 1 <= high for low, high in intervals])

    # One standard error of a share of 0.95 in 400 is 0.011.
    assert 0.915 <= covered <= 0.985


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_processes_cover_no_more_than_their_range_can(count: int) -> None:
    draw = np.random.default_rng(0)
    samples = [synthetic(draw, count) for _ in range(2_000)]
    in_range = np.mean([min(sample) <= 1 <= max(sample) for sample in samples])

    assert in_range == pytest.approx(attainable_coverage(count), abs=0.03)
    for sample in samples[:50]:
        assert median_interval(sample) == pytest.approx((min(sample), max(sample)))


def test_a_ratios_interval_covers_the_ratio() -> None:
    draw = np.random.default_rng(0)
    intervals = [
        compare(1.5 * synthetic(draw, 10), synthetic(draw, 10), None).interval for _ in range(400)
    ]

    covered = np.mean([low <= 1.5 <= high for low, high in intervals])
    assert 0.93 <= covered <= 1


def test_mann_whitney_known_values() -> None:
    """Complete separation of n from n has the two-sided p of 2 / (2n choose n)."""
    for count in (3, 8):
        found = compare(range(1, count + 1), range(count + 1, 2 * count + 1), None)
        assert found.p_value == pytest.approx(2 / math.comb(2 * count, count))


def test_the_floor_of_known_noise_is_its_quantile() -> None:
    """Single processes: the logarithm of a ratio has the standard deviation sqrt(2) s."""
    draw = np.random.default_rng(0)
    floor = noise_floor([synthetic(draw, 200, 0.05)], (1, 1))

    assert floor == pytest.approx(math.expm1(1.96 * math.sqrt(2) * 0.05), rel=0.1)


def test_the_floor_falls_with_more_processes_and_ignores_differences_of_groups() -> None:
    groups = [synthetic(np.random.default_rng(0), 30)]

    assert noise_floor(groups, (10, 10)) < noise_floor(groups, (3, 3)) < noise_floor(groups, (1, 1))
    assert noise_floor([[1.0, 1.0], [5.0, 5.0]], (2, 2)) == 0
    assert noise_floor([[1.0], []], (1, 1)) is None
    assert compare([2.0], [1.0], None).verdict is None


@pytest.mark.parametrize(
    ("factor", "verdict"), [(2.0, "larger"), (0.5, "smaller"), (1.01, NO_DIFFERENCE)]
)
def test_verdicts(factor: float, verdict: str) -> None:
    base = synthetic(np.random.default_rng(0), 10, 0.03)
    found = compare(base * factor, base, noise_floor([base], (10, 10)))

    assert found.verdict == verdict
    assert found.ratio == pytest.approx(factor)
    assert found.interval.low <= factor <= found.interval.high


def test_a_large_ratio_without_significance_is_no_difference() -> None:
    """One outlying half moves the median beyond the floor, but the test sees an overlap."""
    base = [1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3]
    values = [1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3]
    found = compare(values, base, floor=0.1)

    assert found.ratio == pytest.approx(1.3)
    assert found.p_value > 0.05
    assert found.verdict == NO_DIFFERENCE


def resampled(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw two groups of ten real processes, none in both."""
    drawn = np.random.default_rng(index).permutation(REAL)[: 2 * REPLICATES]
    return drawn[:REPLICATES], drawn[REPLICATES:]


def judge(values: np.ndarray, base: np.ndarray) -> str:
    floor = noise_floor([values, base], (REPLICATES, REPLICATES))
    return compare(values, base, floor).verdict


def test_a_slow_down_of_ten_percent_is_found_in_real_noise() -> None:
    first, second = resampled(0)
    assert judge(first * 1.1, second) == "larger"

    verdicts = [judge(first * 1.1, second) for first, second in map(resampled, range(20))]
    assert verdicts.count("larger") >= 18


SIZES = [(2, 2), (3, 2), (5, 5), (8, 8), (9, 10), (1, 4)]


def with_ties(draw: np.random.Generator, count: int) -> list[float]:
    """Positive numbers, of which some are round."""
    values = synthetic(draw, count, spread=0.5)
    return [float(v) for v in np.where(draw.random(count) < 0.3, values.round(1) + 0.1, values)]


def bootstrap(samples, statistic) -> tuple[float, float]:
    """SciPy's interval of one entry, with the seed that intervals are drawn with."""
    drawn = {"n_resamples": 2_000, "confidence_level": 0.95, "rng": np.random.default_rng(0)}
    found = stats.bootstrap(samples, statistic, vectorized=True, method="percentile", **drawn)
    return found.confidence_interval


def test_comparisons_equal_scipys_to_the_bit() -> None:
    draw = np.random.default_rng(3)
    pairs = [[with_ties(draw, n) for n in size] for size in SIZES * 15]

    for values, base in pairs:
        found = compare(values, base, floor=0.03)
        assert found.ratio == np.median(values) / np.median(base)
        if min(len(values), len(base)) == 1:
            assert (found.p_value, found.interval) == (None, None)
            continue
        assert found.p_value == stats.mannwhitneyu(values, base).pvalue
        assert found.interval == bootstrap(
            (values, base), lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis)
        )
    ties = [len({*values, *base}) < len(values) + len(base) for values, base in pairs]
    assert any(ties)
    assert not all(ties)


def test_intervals_equal_scipys_to_the_bit() -> None:
    draw = np.random.default_rng(4)
    groups = [with_ties(draw, count) for count in [0, 1, 2, 3, 5, 10] * 30]

    for group in groups:
        expected = bootstrap((group,), np.median) if len(group) > 1 else None
        assert median_interval(group) == expected
