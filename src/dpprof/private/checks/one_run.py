"""A lower bound on epsilon from one run, by how many of its canaries are guessed.

Each of m canaries is in the data if a fair coin says so. Whoever sees what a training released
guesses the coins of some canaries. Under (epsilon, delta)-differential privacy few guesses are
right, whatever else is in the data: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One
(1) Training Run", theorem 5.2.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

_FEWEST = 16  # guesses below which none are tried: all right, they show an epsilon of at most 1
_HALVINGS = 50  # of the interval of epsilon, to a relative width below 1e-14
_MOST = 50.0  # the largest epsilon that is looked for; no number of canaries could show it


class Guesses(NamedTuple):
    """A bound, and the guesses that show it."""

    epsilon: float  # the lower bound
    guesses: int
    right: int


def find_p_value(right: int, guesses: int, canaries: int, *, epsilon: float, delta: float) -> float:
    """Bound the probability of so many right guesses under (epsilon, delta)-differential privacy.

    Each of the ``canaries`` is included by a fair coin, and nothing was guessed on those beyond
    ``guesses``. Source: Steinke et al. 2023, theorem 5.2 and algorithm 2.
    """
    probability = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, probability))
    below = binom.pmf(right - np.arange(1, canaries + 1), guesses, probability)
    alpha = float((np.cumsum(below) / np.arange(1, canaries + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def bound_epsilon(
    right: int, guesses: int, canaries: int, *, delta: float, significance: float
) -> float:
    """Return the largest epsilon that so many right guesses reject; 0 where they reject none."""

    def rejects(epsilon: float) -> bool:
        p_value = find_p_value(right, guesses, canaries, epsilon=epsilon, delta=delta)
        return p_value <= significance

    low, high = 0.0, _MOST
    if not rejects(low):
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rejects(middle) else (low, middle)
    return low


def guess(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    *,
    delta: float,
    significance: float,
) -> Guesses:
    """Guess that canaries of high scores were included, and those of low scores were not.

    It guesses all, half, a quarter of them and so on, always on the most certain, and tells the
    best bound. Each number of guesses has its share of the significance, so that the best holds.
    ``scores``, (m,), must not follow from the coins ``included``, (m,), but by what was released.
    """
    canaries = len(scores)
    numbers = [canaries]
    while numbers[-1] // 2 >= _FEWEST:
        numbers.append(numbers[-1] // 2)
    order = included[np.argsort(scores, kind="stable")]
    tried = []
    for guesses in numbers:
        as_included = (guesses + 1) // 2
        right = int(order[canaries - as_included :].sum() + (~order[: guesses // 2]).sum())
        bound = bound_epsilon(
            right, guesses, canaries, delta=delta, significance=significance / len(numbers)
        )
        tried.append(Guesses(bound, guesses, right))
    return max(tried)
