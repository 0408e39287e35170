"""The noise that each mechanism needs for a privacy budget, in as many steps.

With ``banded`` noise steps draw from as many folds of the data as there are bands. Then each sample
may take part in one of so many steps, with so many times the probability, and each is a Gaussian
mechanism. With ``bisr`` all steps are one, and each fold is an epoch's batch: samples return as
seldom as the data allow.
"""

import json
import math
from collections.abc import Sequence

from dpprof.experiments.accounting.noise import find_batch_size
from dpprof.experiments.accounting.plan import (
    MOMENTUM,
    NoiseOfBatch,
    NoiseOfMechanism,
    bands_of,
    describe_noise,
    explain_impossible,
)
from dpprof.experiments.config.privacy import Privacy
from dpprof.private.accounting.noise_multiplier import find_noise_multiplier, find_tightest
from dpprof.private.accounting.schedule import Schedule
from dpprof.private.accounting.search import BeyondReachError
from dpprof.private.noise.strategies import NoiseErrors, find_errors, make_strategy

_INDEPENDENT = "independent"


def plan_mechanisms(
    privacy: Privacy, planned: NoiseOfBatch, names: Sequence[str], *, momentum: float
) -> list[NoiseOfMechanism]:
    """Plan the noise of mechanisms for the first epsilon, in as many steps as are planned.

    ``planned`` is independent noise with the planned batch, ``momentum`` that of the sum whose
    noise is to equal it: 0, or ``MOMENTUM``. What no accountant tells is None, with the reason.
    """
    assert planned.step_noise is not None
    alone = _measure(_INDEPENDENT, planned.steps, 1, momentum)
    target = planned.step_noise * alone.training
    return [_plan(privacy, planned, name, momentum, target) for name in names]


def _plan(
    privacy: Privacy, planned: NoiseOfBatch, name: str, momentum: float, target: float
) -> NoiseOfMechanism:
    bands, size, steps = bands_of(name), planned.batch_size, planned.steps
    is_one = name.startswith("bisr")
    plan = NoiseOfMechanism(mechanism=name, folds=privacy.samples // size if is_one else bands)
    if why := explain_impossible(name, planned, privacy.samples):
        return plan.model_copy(update={"reason": why})
    of = Schedule(privacy.samples, bands * size, math.ceil(steps / bands))
    multiplier, accountant = planned.noise_multiplier or 0.0, planned.accountant
    epsilon, delta = privacy.epsilon[0], privacy.delta
    try:
        if name != _INDEPENDENT:
            counted = Schedule(1, 1, 1) if is_one else of  # no sampling amplifies all of bisr
            multiplier, accountant = find_tightest(
                lambda by: find_noise_multiplier(counted, epsilon, delta, by), privacy.accountant
            )
        plain, heavy = (_measure(name, steps, plan.folds, each) for each in (0.0, MOMENTUM))
        plan = plan.model_copy(
            update={
                "noise_multiplier": multiplier,
                "accountant": accountant,
                "step_noise": multiplier / size * plain.step,
                "sum_noise": multiplier / size * plain.training,
                "momentum_noise": multiplier / size * heavy.training,
            }
        )
        batch, equal = size, multiplier
        if is_one:
            batch = _find_one(privacy, name, steps, momentum, target / multiplier)
        elif name != _INDEPENDENT:
            each = target / _measure(name, steps, bands, momentum).training
            turn = describe_noise(of, each / bands * of.batch_size, None)  # of a turn of all folds
            drawn = find_batch_size(turn, privacy, epsilon)
            batch = math.ceil(drawn / bands)
            equal = each * batch
    except BeyondReachError as error:
        return plan.model_copy(update={"reason": str(error)})
    return plan.model_copy(update={"batch_size": batch, "batch_noise_multiplier": equal})


def _measure(name: str, steps: int, folds: int, momentum: float) -> NoiseErrors:
    noise = "bisr" if name.startswith("bisr") else "banded"
    strategy = make_strategy(noise, steps=steps, bands=bands_of(name), folds=folds)
    return find_errors(strategy, momentum=momentum)


def _find_one(privacy: Privacy, name: str, steps: int, momentum: float, error: float) -> int:
    """Find the least batch whose sum has at most an error, relative to the noise multiplier."""

    def suffices(size: int) -> bool:
        return _measure(name, steps, privacy.samples // size, momentum).training <= error * size

    most = privacy.samples // bands_of(name)
    if not suffices(most):
        raise BeyondReachError(f"not even a batch of {most:,} has as little noise in the sum")
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def account(privacy: str, planned: str, names: str, momentum: str) -> list[NoiseOfMechanism]:
    """Plan mechanisms for a budget and its planned batch, all given as JSON."""
    asked, batch = Privacy.model_validate_json(privacy), NoiseOfBatch.model_validate_json(planned)
    return plan_mechanisms(asked, batch, json.loads(names), momentum=json.loads(momentum))
