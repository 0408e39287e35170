"""The noise that a privacy budget asks for, by Opacus's accountants.

Batches are Poisson-sampled, and neighbouring data differ in one sample that is added or removed.
``prv`` composes privacy loss random variables (Gopi et al. 2021) and returns an upper bound whose
error is at most 0.01. ``rdp`` is Renyi differential privacy (Mironov 2017, Mironov et al. 2019) at
Opacus's orders, up to 63: a looser bound, which does not reach small epsilons.

Opacus imports torch, so planning and reporting call ``dpprof.launch.accounting_run``.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence

from opacus.accountants import create_accountant

from dpprof.accounting.plan import (
    AtEpsilon,
    NoiseOfBatch,
    NoisePlan,
    Schedule,
    batches_around,
    choose_batch,
    describe_noise,
    largest_batch,
    schedule,
)
from dpprof.accounting.search import MOST, BeyondReachError, find_least
from dpprof.spec.privacy import Accountant, Privacy

EPSILON_TOLERANCE = 0.01
"""The spent epsilon is at most this much below the budget, as by Opacus, and at most this share."""

_FAILURES = (ArithmeticError, IndexError, MemoryError, RuntimeError, ValueError)
"""What Opacus's accountants and ``find_least`` raise, as where floating point does not suffice."""


def spend(of: Schedule, noise_multiplier: float, delta: float, accountant: Accountant) -> float:
    """Return the epsilon that a training with a noise multiplier spends."""
    book = create_accountant(mechanism=accountant)
    book.history = [(noise_multiplier, of.sample_rate, of.steps)]
    with warnings.catch_warnings():
        # That another order might give a tighter bound; and divisions by zero at a sample rate
        # of 1, whose results are not used.
        warnings.simplefilter("ignore")
        return float(book.get_epsilon(delta=delta))


def find_noise_multiplier(
    of: Schedule, epsilon: float, delta: float, accountant: Accountant
) -> float:
    """Find a noise multiplier that spends a budget, up to ``EPSILON_TOLERANCE``, and no more.

    As Opacus's ``get_noise_multiplier``, with fewer calls: each takes PRV up to seconds.

    Raises:
        BeyondReachError: No noise multiplier does, or the accountant fails.
    """
    try:
        return _find(lambda s, by: spend(of, s, delta, by), epsilon, accountant, 1.0)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"{accountant} knows no noise multiplier for epsilon {epsilon:g} with batches of "
            f"{of.batch_size:,}: {error}"
        ) from None


def find_batch_size(
    planned: NoiseOfBatch, samples: int, epsilon: float, delta: float, accountant: Accountant
) -> int:
    """Find the least batch that spends a budget in as many steps with as little noise in each.

    The noise of a step's averaged gradient is that of the plan, so its noise multiplier grows as
    the batch does. Less is spent, because both the noise and the sampled share have grown.

    Raises:
        BeyondReachError: Not even batches of all samples do, or the accountant fails.
    """
    assert planned.step_noise is not None
    step_noise, guess = planned.step_noise, float(planned.batch_size)

    def spent(batch_size: float, by: Accountant) -> float:
        size = min(math.ceil(batch_size), samples)
        return spend(Schedule(samples, size, planned.steps), step_noise * size, delta, by)

    try:
        return min(math.ceil(_find(spent, epsilon, accountant, guess, samples)), samples)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"no batch has as little noise in a step at epsilon {epsilon:g}: one of {error}"
        ) from None


def _find(
    spent: Callable[[float, Accountant], float],
    epsilon: float,
    accountant: Accountant,
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
            except _FAILURES:
                pass  # PRV knows epsilons that RDP does not
        tolerance = EPSILON_TOLERANCE * min(1.0, epsilon)
        return find_least(lambda v: spent(v, accountant), epsilon, tolerance, guess, most)
    except BeyondReachError:
        raise
    except _FAILURES as error:
        why = f"{accountant} fails: {type(error).__name__}: {error}"
        raise BeyondReachError(why[:200]) from None


def plan_noise(privacy: Privacy, tokens_per_sample: float) -> NoisePlan:
    """Plan batch, steps and noise for a privacy budget.

    Figures that the accountant cannot compute are None, with the reason.
    """
    epsilon, *others = privacy.epsilon
    largest = privacy.batch_size or largest_batch(privacy, tokens_per_sample)
    batches = [
        _noise_of(privacy, schedule(privacy, tokens_per_sample, size), epsilon)
        for size in batches_around(largest, privacy.samples)
    ]
    chosen = privacy.batch_size or choose_batch(batches, largest)
    planned = next(one for one in batches if one.batch_size == chosen)
    first = AtEpsilon(
        epsilon=epsilon,
        same_batch_noise_multiplier=planned.noise_multiplier,
        batch_size=None if planned.noise_multiplier is None else chosen,
        noise_multiplier=planned.noise_multiplier,
        tokens=planned.steps * chosen * tokens_per_sample,
        reason=planned.reason,
    )
    rest = [_plan_other(privacy, tokens_per_sample, planned, one) for one in others]
    return NoisePlan(
        tokens_per_sample=tokens_per_sample,
        batches=batches,
        batch_size=chosen,
        epsilons=[first, *rest],
    )


def _noise_of(privacy: Privacy, of: Schedule, epsilon: float) -> NoiseOfBatch:
    try:
        found = find_noise_multiplier(of, epsilon, privacy.delta, privacy.accountant)
    except BeyondReachError as error:
        return describe_noise(of, None, str(error))
    return describe_noise(of, found, None)


def _plan_other(
    privacy: Privacy, tokens_per_sample: float, planned: NoiseOfBatch, epsilon: float
) -> AtEpsilon:
    same = _noise_of(privacy, Schedule(privacy.samples, planned.batch_size, planned.steps), epsilon)
    found, reason = None, planned.reason
    if planned.step_noise is not None:
        try:
            found = find_batch_size(
                planned, privacy.samples, epsilon, privacy.delta, privacy.accountant
            )
        except BeyondReachError as error:
            reason = str(error)
    return AtEpsilon(
        epsilon=epsilon,
        same_batch_noise_multiplier=same.noise_multiplier,
        batch_size=found,
        noise_multiplier=found and (planned.step_noise or 0.0) * found,
        tokens=found and planned.steps * found * tokens_per_sample,
        reason=reason or same.reason,
    )


def account(privacy: str, tokens_per_sample: str) -> Sequence[NoisePlan]:
    """Plan for each number of tokens in a sample, given as JSON, as is the budget."""
    asked = Privacy.model_validate_json(privacy)
    return [plan_noise(asked, tokens) for tokens in json.loads(tokens_per_sample)]
