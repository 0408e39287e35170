"""Strategies of correlated noise are those of dense matrices, and of jax_privacy."""

import itertools
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
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


def test_more_bands_have_less_noise_in_a_training_and_more_in_a_step() -> None:
    errors = [find_errors(make_strategy("banded", steps=300, bands=b)) for b in (1, 2, 4, 8, 16)]
    assert all(more.training < fewer.training for fewer, more in itertools.pairwise(errors))
    assert all(each.step > 1 for each in errors[1:])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"noise": "tree"}, "noise must be one of banded, bisr, and is 'tree'"),
        ({"bands": 0}, "bands must be a whole number, at least 1, and is 0"),
        ({"bands": 2.0}, r"bands must be a whole number, at least 1, and is 2\.0"),
        ({"steps": True}, "steps must be a whole number, at least 1, and is True"),
        ({"folds": -1}, "folds must be a whole number, at least 1, and is -1"),
        ({"bands": 11}, "11 bands are more than the 10 steps of the training"),
        ({"folds": 3}, r"4 bands need samples .* and here that holds for 3 \(folds\)"),
    ],
)
def test_what_is_no_strategy_is_refused(settings, told) -> None:
    with pytest.raises(ValueError, match=told):
        make_strategy(**{"noise": "banded", "steps": 10, "bands": 4} | settings)
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1, and is 1"):
        find_errors(make_strategy("banded", steps=2, bands=1), momentum=1)
    for column in ([1.0, 0.5, 0.6], [1.0, -0.5, -0.6]):
        with pytest.raises(ValueError, match="columns that fall, and stay at least 0"):
            find_sensitivity(np.array(column), 1)


_ORACLE = """
import json, sys, jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from jax_privacy.matrix_factorization import toeplitz
answers = []
for n, bands, folds in json.loads(sys.argv[1]):
    banded = toeplitz.optimize_banded_toeplitz(n, bands)
    root = jnp.zeros(n).at[:bands].set(toeplitz.optimal_max_error_noising_coefs(n)[:bands])
    strategy = toeplitz.inverse_coef(root)
    square = toeplitz.minsep_sensitivity_squared(strategy, folds, n=n, skip_checks=True)
    mean = lambda **of: float(jnp.mean(toeplitz.per_query_error(n=n, **of)) ** 0.5)
    answers.append([banded.tolist(), mean(strategy_coef=banded), float(square**0.5),
                    float(square**0.5) * mean(noising_coef=root)])
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_strategies_are_those_of_jax_privacy() -> None:
    """``JAX_PRIVACY_PYTHON`` is a Python with jax-privacy 2.0.0."""
    python = os.environ.get("JAX_PRIVACY_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("JAX_PRIVACY_PYTHON names no Python with jax-privacy")
    cases = [(10, 3, 3), (100, 1, 1), (100, 8, 10), (100, 100, 100), (1000, 16, 16), (2000, 64, 70)]
    ran = subprocess.run(
        [python, "-c", _ORACLE, json.dumps(cases)], check=True, capture_output=True, text=True
    )
    answers = json.loads(ran.stdout)
    for (steps, bands, folds), (column, error, sensitivity, of_root) in zip(
        cases, answers, strict=True
    ):
        banded = make_strategy("banded", steps=steps, bands=bands, folds=folds)
        assert banded.coefficients == pytest.approx(column, abs=1e-6)
        assert find_errors(banded).training == pytest.approx(error, rel=1e-8)
        bisr = make_strategy("bisr", steps=steps, bands=bands, folds=folds)
        assert bisr.scale == pytest.approx(sensitivity, rel=1e-9)
        assert find_errors(bisr).training == pytest.approx(of_root, rel=1e-9)
