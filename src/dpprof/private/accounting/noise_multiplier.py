"""Finds the noise that a privacy budget asks for, by Opacus's accountants.

Batches are Poisson-sampled, and neighbouring data differ in one sample that is added or removed.
``prv`` composes privacy loss random variables (Gopi et al. 2021) and returns an upper bound whose
error is at most 0.01. ``rdp`` is Renyi differential privacy (Mironov 2017, Mironov et al. 2019) at
Opacus's orders, up to 63: a looser bound, which does not reach small epsilons.
"""

import warnings
from collections.abc import Callable

from opacus.accountants import create_accountant

from dpprof.private.accounting.schedule import Schedule
from dpprof.private.accounting.search import FAILURES, MOST, BeyondReachError, find_least

EPSILON_TOLERANCE = 0.01
"""The spent epsilon is at most this much below the budget, as by Opacus, and at most this share."""


def spend(of: Schedule, noise_multiplier: float, delta: float, accountant: str) -> float:
    """Return the epsilon that a training with a noise multiplier spends."""
    book = create_accountant(mechanism=accountant)
    book.history = [(noise_multiplier, of.sample_rate, of.steps)]
    with warnings.catch_warnings():
        # That another order might give a tighter bound; and divisions by zero at a sample rate
        # of 1, whose results are not used.
        warnings.simplefilter("ignore")
        return float(book.get_epsilon(delta=delta))


def find_noise_multiplier(of: Schedule, epsilon: float, delta: float, accountant: str) -> float:
    """Find a noise multiplier that spends a budget, up to ``EPSILON_TOLERANCE``, and no more.

    It does what Opacus's ``get_noise_multiplier`` does, with fewer calls: one of PRV takes up to
    seconds.

    Raises:
        BeyondReachError: No noise multiplier does, or the accountant fails.
    """
    try:
        return find_by_accountant(lambda s, by: spend(of, s, delta, by), epsilon, accountant, 1.0)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"{accountant} knows no noise multiplier for epsilon {epsilon:g} with batches of "
            f"{of.batch_size:,}: {error}"
        ) from None


def find_by_accountant(
    spent: Callable[[float, str], float],
    epsilon: float,
    accountant: str,
    guess: float,
    most: float = MOST,
) -> float:
    """Find the least value that spends a budget.

    Raises:
        BeyondReachError: No value does, or the accountant fails; the message says what happened.
    """
    try:
        if accountant == "prv":
            try:  # RDP is fast and asks for some 5 % more
                least = find_least(lambda v: spent(v, "rdp"), epsilon, epsilon / 20, guess, most)
                guess = 0.95 * least
            except FAILURES:
                pass  # PRV knows epsilons that RDP does not
        tolerance = EPSILON_TOLERANCE * min(1.0, epsilon)
        return find_least(lambda v: spent(v, accountant), epsilon, tolerance, guess, most)
    except BeyondReachError:
        raise
    except FAILURES as error:
        why = f"{accountant} fails: {type(error).__name__}: {error}"
        raise BeyondReachError(why[:200]) from None
