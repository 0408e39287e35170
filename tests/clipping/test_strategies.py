"""Strategies of correlated noise are those of dense matrices."""

import itertools
import math

import numpy as np
import pytest
from snapshots import assert_sentences, refusals_of
from strategy_matrices import matrix, triangle

from dpprof.private.noise.strategies import (
    NOISES,
    find_errors,
    find_sensitivity,
    inverse_root,
    make_strategy,
)

CASES = list(itertools.product(NOISES, [(1, 1), (6, 1), (7, 3), (8, 8), (40, 5)]))


def participations(steps: int, folds: int):
    """List the steps in which a sample may take part, so many apart at least."""
    for count in range(1, -(-steps // folds) + 1):
        for chosen in itertools.combinations(range(steps), count):
            if all(later - earlier >= folds for earlier, later in itertools.pairwise(chosen)):
                yield list(chosen)


@pytest.mark.parametrize(("noise", "sizes"), CASES)
def test_errors_are_those_of_dense_matrices(noise, sizes) -> None:
    steps, bands = sizes
    strategy = make_strategy(noise, steps=steps, bands=bands)
    inverse = np.linalg.inv(matrix(strategy))
    for momentum in (0.0, 0.9):
        velocity = triangle(momentum ** np.arange(steps), steps)
        training = np.tril(np.ones((steps, steps))) @ velocity @ inverse
        step, told = find_errors(strategy, momentum=momentum)
        assert told == pytest.approx(np.linalg.norm(training) / math.sqrt(steps), rel=1e-9)
        assert step == pytest.approx(np.linalg.norm(inverse) / math.sqrt(steps), rel=1e-9)


@pytest.mark.parametrize(("steps", "bands", "folds"), [(7, 2, 2), (7, 3, 3), (8, 2, 3), (6, 1, 1)])
def test_no_sample_moves_what_is_seen_by_more_than_the_sensitivity(steps, bands, folds) -> None:
    rows = matrix(make_strategy("bisr", steps=steps, bands=bands, folds=folds))
    moves = [
        np.linalg.norm(rows[:, chosen] @ signs)
        for chosen in participations(steps, folds)
        for signs in itertools.product([-1, 1], repeat=len(chosen))
    ]
    assert max(moves) == pytest.approx(1, rel=1e-12)  # the scale is no larger than it has to be
    rows = matrix(make_strategy("banded", steps=steps, bands=bands, folds=folds))
    assert np.linalg.norm(rows, axis=0).max() == pytest.approx(1, rel=1e-12)
    for chosen in participations(steps, folds):
        assert (np.count_nonzero(rows[:, chosen], axis=1) <= 1).all()  # each in its own rows


def test_known_answers() -> None:
    assert inverse_root(5) == pytest.approx([1, -1 / 2, -1 / 8, -1 / 16, -5 / 128])
    assert find_sensitivity(np.array([2.0, 1, 0, 0, 0, 0]), 2) == pytest.approx(math.sqrt(15))
    assert find_sensitivity(np.array([1.0, 1, 1, 1]), 2) == pytest.approx(math.sqrt(1 + 1 + 4 + 4))
    independent = make_strategy("banded", steps=50, bands=1)
    assert (independent.scale, independent.weights) == (1, ())
    assert find_errors(independent) == pytest.approx((1, math.sqrt(51 / 2)))
    # Without noise correlated, k participations are k mechanisms.
    assert make_strategy("bisr", steps=7, bands=1, folds=2).scale == pytest.approx(math.sqrt(4))


@pytest.mark.parametrize("steps", [2, 9, 60])
def test_two_bands_are_the_best_ones(steps) -> None:
    def measure(angle: float) -> float:
        inverse = np.linalg.inv(triangle([math.cos(angle), math.sin(angle)], steps))
        return float(np.linalg.norm(np.cumsum(inverse, axis=0)) / math.sqrt(steps))

    best = min(map(measure, np.linspace(-1.2, 1.2, 2001)))
    made = find_errors(make_strategy("banded", steps=steps, bands=2)).training
    assert best * (1 - 1e-5) <= made <= best * (1 + 1e-12)


def test_what_is_no_strategy_is_refused() -> None:
    assert_sentences("clipping/strategies", refusals_of(make_strategy))
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1, and is 1"):
        find_errors(make_strategy("banded", steps=2, bands=1), momentum=1)
    for column in ([1.0, 0.5, 0.6], [1.0, -0.5, -0.6]):
        with pytest.raises(ValueError, match="columns that fall, and stay at least 0"):
            find_sensitivity(np.array(column), 1)
