"""Finds the noise that a privacy budget asks for, by any accountant (``accountants``)."""

from collections.abc import Callable

from dpprof.private.accounting.accountants import bound_epsilon, list_installed
from dpprof.private.accounting.schedule import Sampling, Schedule
from dpprof.private.accounting.search import FAILURES, MOST, BeyondReachError, find_least

EPSILON_TOLERANCE = 0.01  # how far below the budget epsilon may be, and as which share of it


def spend(of: Schedule, noise_multiplier: float, delta: float, accountant: str) -> float:
    """Return the epsilon that a training with a noise multiplier spends."""
    return bound_epsilon([(noise_multiplier, of.sample_rate, of.steps)], delta, accountant)


def find_noise_multiplier(of: Schedule, epsilon: float, delta: float, accountant: str) -> float:
    """Find a noise multiplier that spends a budget, up to ``EPSILON_TOLERANCE``, and no more."""
    try:
        return find_by_accountant(lambda s, by: spend(of, s, delta, by), epsilon, accountant, 1.0)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"{accountant} knows no noise multiplier for epsilon {epsilon:g} with batches of "
            f"{of.batch_size:,}: {error}"
        ) from None


def find_for_sampling(
    sampling: Sampling, steps: int, epsilon: float, delta: float, accountant: str
) -> float:
    """Find a noise multiplier as ``find_noise_multiplier``, for steps that draw in some way."""
    turns = sampling.count_turns(steps)

    def find(by: str) -> float:
        return find_by_accountant(
            lambda s, by: bound_epsilon([(s, sampling.rate, turns)], delta, by, sampling),
            epsilon,
            by,
            1.0,
        )

    return find_tightest(find, accountant)[0]


def find_tightest(find: Callable[[str], float], accountant: str) -> tuple[float, str]:
    """Return the least that an accountant asks for, and its name; of all for ``tightest``."""
    if accountant != "tightest":
        return find(accountant), accountant
    found: dict[str, float] = {}
    for by in list_installed():
        try:
            found[by] = find(by)
        except BeyondReachError as error:
            failure = error
    if not found:
        raise failure
    best = min(found, key=found.__getitem__)
    return found[best], best


def find_by_accountant(
    spent: Callable[[float, str], float],
    epsilon: float,
    accountant: str,
    guess: float,
    most: float = MOST,
) -> float:
    """Find the least value that spends a budget, with few calls of a slow accountant."""
    try:
        if accountant != "rdp":
            try:  # RDP is fast and asks for some 5 % more
                least = find_least(lambda v: spent(v, "rdp"), epsilon, epsilon / 20, guess, most)
                guess = 0.95 * least
            except FAILURES:
                pass  # others know epsilons that RDP does not
        tolerance = EPSILON_TOLERANCE * min(1.0, epsilon)
        return find_least(lambda v: spent(v, accountant), epsilon, tolerance, guess, most)
    except BeyondReachError:
        raise
    except FAILURES as error:
        why = f"{accountant} fails: {type(error).__name__}: {error}"
        raise BeyondReachError(why[:200]) from None
