"""The noise that each size of batch needs for a privacy budget.

Opacus's accountants import torch, so planning and reporting call
``dpprof.experiments.launch.accounting_run``.
"""

import json
import math
from collections.abc import Sequence

from dpprof.experiments.accounting import plan
from dpprof.experiments.config.privacy import Privacy
from dpprof.private.accounting.noise_multiplier import (
    find_by_accountant,
    find_noise_multiplier,
    find_tightest,
    spend,
)
from dpprof.private.accounting.schedule import Schedule
from dpprof.private.accounting.search import BeyondReachError


def find_batch_size(planned: plan.NoiseOfBatch, privacy: Privacy, epsilon: float) -> int:
    """Find the least batch that spends a budget with the planned steps and noise in a step.

    The noise of a step's averaged gradient is that of the plan, so its noise multiplier grows as
    the batch does. Less is spent, because both the noise and the sampled share have grown.

    Raises:
        BeyondReachError: Not even batches of all samples do, or the accountant fails.
    """
    assert planned.step_noise is not None
    step_noise, guess = planned.step_noise, float(planned.batch_size)
    samples = privacy.samples

    def spent(batch_size: float, by: str) -> float:
        size = min(math.ceil(batch_size), samples)
        return spend(Schedule(samples, size, planned.steps), step_noise * size, privacy.delta, by)

    try:
        least, _ = find_tightest(
            lambda by: find_by_accountant(spent, epsilon, by, guess, samples), privacy.accountant
        )
        return min(math.ceil(least), samples)
    except BeyondReachError as error:
        raise BeyondReachError(
            f"no batch has as little noise in a step at epsilon {epsilon:g}: one of {error}"
        ) from None


def plan_noise(privacy: Privacy, tokens_per_sample: float) -> plan.NoisePlan:
    """Plan batch, steps and noise for a privacy budget.

    Figures that the accountant cannot compute are None, with the reason.
    """
    epsilon, *others = privacy.epsilon
    largest = privacy.batch_size or plan.largest_batch(privacy, tokens_per_sample)
    batches = [
        _noise_of(privacy, plan.schedule(privacy, tokens_per_sample, size), epsilon)
        for size in plan.batches_around(largest, privacy.samples)
    ]
    chosen = privacy.batch_size or plan.choose_batch(batches, largest)
    planned = next(noise for noise in batches if noise.batch_size == chosen)
    first = plan.AtEpsilon(
        epsilon=epsilon,
        same_batch_noise_multiplier=planned.noise_multiplier,
        batch_size=None if planned.noise_multiplier is None else chosen,
        noise_multiplier=planned.noise_multiplier,
        tokens=planned.steps * chosen * tokens_per_sample,
        reason=planned.reason,
    )
    rest = [_plan_other(privacy, tokens_per_sample, planned, other) for other in others]
    return plan.NoisePlan(
        tokens_per_sample=tokens_per_sample,
        batches=batches,
        batch_size=chosen,
        epsilons=[first, *rest],
    )


def _noise_of(privacy: Privacy, of: Schedule, epsilon: float) -> plan.NoiseOfBatch:
    try:
        multiplier, accountant = find_tightest(
            lambda by: find_noise_multiplier(of, epsilon, privacy.delta, by), privacy.accountant
        )
        return plan.describe_noise(of, multiplier, None, accountant)
    except BeyondReachError as error:
        return plan.describe_noise(of, None, str(error))


def _plan_other(
    privacy: Privacy, tokens_per_sample: float, planned: plan.NoiseOfBatch, epsilon: float
) -> plan.AtEpsilon:
    same = _noise_of(privacy, Schedule(privacy.samples, planned.batch_size, planned.steps), epsilon)
    batch_size, reason = None, planned.reason
    if planned.step_noise is not None:
        try:
            batch_size = find_batch_size(planned, privacy, epsilon)
        except BeyondReachError as error:
            reason = str(error)
    return plan.AtEpsilon(
        epsilon=epsilon,
        same_batch_noise_multiplier=same.noise_multiplier,
        batch_size=batch_size,
        noise_multiplier=batch_size and (planned.step_noise or 0.0) * batch_size,
        tokens=batch_size and planned.steps * batch_size * tokens_per_sample,
        reason=reason or same.reason,
    )


def account(privacy: str, tokens_per_sample: str) -> Sequence[plan.NoisePlan]:
    """Plan for each number of tokens in a sample, given as JSON, as is the budget."""
    asked = Privacy.model_validate_json(privacy)
    return [plan_noise(asked, tokens) for tokens in json.loads(tokens_per_sample)]
