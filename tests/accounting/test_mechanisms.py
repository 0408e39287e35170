"""Noise by mechanism: what a loop with it would find, and batches with equal noise in the sum."""

import math

import pytest

from dpprof.experiments.accounting.mechanisms import account, plan_mechanisms
from dpprof.experiments.accounting.plan import describe_noise
from dpprof.experiments.config.privacy import Privacy
from dpprof.private.accounting.budget import find_noise
from dpprof.private.accounting.noise_multiplier import EPSILON_TOLERANCE, spend
from dpprof.private.accounting.schedule import Sampling, Schedule
from dpprof.private.noise.strategies import find_errors, make_strategy

SAMPLES, BATCH, STEPS, EPSILON, DELTA = 20_000, 100, 400, 4.0, 1e-6
PRIVACY = Privacy.model_validate(
    {"samples": SAMPLES, "tokens": SAMPLES, "epsilon": EPSILON, "delta": DELTA}
    | {"batch_size": BATCH, "accountant": "rdp"}
)
NOISE = find_noise(EPSILON, DELTA, STEPS, Sampling(BATCH / SAMPLES), "rdp")
PLANNED = describe_noise(Schedule(SAMPLES, BATCH, STEPS), NOISE, None, "rdp")


def plan(*names, momentum=0.0):
    planned = plan_mechanisms(PRIVACY, PLANNED, names, momentum=momentum)
    assert [each.mechanism for each in planned] == list(names)
    return planned if len(planned) > 1 else planned[0]


def sum_noise(multiplier, batch, noise, bands, *, folds=None, momentum=0.0):
    """Of the sum over steps, by the strategy itself."""
    strategy = make_strategy(noise, steps=STEPS, bands=bands, folds=folds)
    return multiplier / batch * find_errors(strategy, momentum=momentum).training


def test_independent_noise_is_that_of_the_plan_and_adds_up_over_steps() -> None:
    alone = plan("independent")

    assert (alone.noise_multiplier, alone.batch_size, alone.folds) == (NOISE, BATCH, 1)
    assert alone.step_noise == pytest.approx(NOISE / BATCH)
    # The sum of t draws has a variance of t: (STEPS + 1) / 2 on average.
    assert alone.sum_noise == pytest.approx(NOISE / BATCH * math.sqrt((STEPS + 1) / 2))


def test_noise_multipliers_are_those_that_a_loop_finds() -> None:
    banded, bisr = plan("banded-8", "bisr-8")
    in_folds = Sampling(8 * BATCH / SAMPLES, folds=8)

    found = find_noise(EPSILON, DELTA, STEPS, in_folds, "rdp")
    assert banded.noise_multiplier == pytest.approx(found, rel=1e-9)
    assert bisr.noise_multiplier == find_noise(EPSILON, DELTA, 1, Sampling(1.0), "rdp")
    assert (banded.folds, bisr.folds) == (8, SAMPLES // BATCH)
    assert banded.sum_noise == pytest.approx(sum_noise(found, BATCH, "banded", 8))


def test_one_band_is_independent_noise() -> None:
    one = plan("banded-1")

    assert one.noise_multiplier == pytest.approx(NOISE)
    assert one.batch_size == pytest.approx(BATCH, abs=1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bands", [2, 8])
def test_the_batch_has_as_little_noise_in_the_sum_and_spends_no_more(bands, momentum) -> None:
    banded = plan(f"banded-{bands}", momentum=momentum)
    noise, batch = banded.batch_noise_multiplier, banded.batch_size
    target = sum_noise(NOISE, BATCH, "banded", 1, momentum=momentum)

    assert sum_noise(noise, batch, "banded", bands, momentum=momentum) == pytest.approx(target)
    spent = [
        spend(
            Schedule(SAMPLES, bands * size, math.ceil(STEPS / bands)),
            noise / batch * size,
            DELTA,
            "rdp",
        )
        for size in (batch, batch - 1)
    ]
    assert spent[0] <= EPSILON < spent[1] + EPSILON_TOLERANCE
    assert batch < BATCH


def test_of_bisr_a_sample_fewer_has_more_noise_in_the_sum() -> None:
    bisr = plan("bisr-8")
    target = sum_noise(NOISE, BATCH, "banded", 1)

    noises = [
        sum_noise(bisr.noise_multiplier, size, "bisr", 8, folds=SAMPLES // size)
        for size in (bisr.batch_size - 1, bisr.batch_size)
    ]
    assert noises[0] > target >= noises[1]


def test_what_cannot_be_is_told() -> None:
    """Folds with less than a batch, a small epsilon, more bands than steps."""
    small, long = plan("banded-201", "bisr-401")
    assert small.reason.startswith("201 folds of 99.5025 samples are too few for batches of 100")
    assert small.noise_multiplier is None
    assert "401 bands too many for 400 steps" in long.reason

    strict = PRIVACY.model_copy(update={"epsilon": [0.01]})
    [told] = plan_mechanisms(strict, PLANNED, ["banded-2"], momentum=0.0)
    assert "rdp knows no noise multiplier for epsilon 0.01" in told.reason


def test_a_process_of_its_own_is_asked_in_json() -> None:
    asked = PRIVACY.model_dump_json(), PLANNED.model_dump_json(), '["independent"]', "0.0"

    assert account(*asked) == [plan("independent")]
