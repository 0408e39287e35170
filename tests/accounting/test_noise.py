"""Noise by Opacus's accountants, against its own search and the Gaussian mechanism's formula."""

import itertools
import math

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

from dpprof.experiments.accounting import noise
from dpprof.experiments.accounting.noise import find_batch_size, plan_noise
from dpprof.experiments.accounting.plan import describe_noise
from dpprof.experiments.config.privacy import Privacy
from dpprof.private.accounting import noise_multiplier
from dpprof.private.accounting.noise_multiplier import (
    EPSILON_TOLERANCE,
    find_noise_multiplier,
    spend,
)
from dpprof.private.accounting.schedule import Schedule
from dpprof.private.accounting.search import BeyondReachError

SCHEDULES = {
    "a thousand steps": (Schedule(60_000, 600, 1000), 3.0, 1e-5),
    "few steps of many": (Schedule(10_000, 1000, 50), 1.0, 1e-5),
    "a language model": (Schedule(1_000_000, 4096, 477), 8.0, 1e-7),
}
ACCOUNTANTS = {"rdp": RDPAccountant, "prv": PRVAccountant}
FAST = [("a thousand steps", "rdp"), ("few steps of many", "prv")]
EVERY = list(itertools.product(SCHEDULES, ACCOUNTANTS))


@pytest.mark.parametrize(
    ("name", "accountant"),
    [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY if one not in FAST)],
)
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_the_noise_is_that_of_opacus_and_spends_the_budget(name, accountant) -> None:
    schedule, epsilon, delta = SCHEDULES[name]

    found = find_noise_multiplier(schedule, epsilon, delta, accountant)

    opacus = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=schedule.batch_size / schedule.samples,
        steps=schedule.steps,
        accountant=accountant,
    )
    book = ACCOUNTANTS[accountant]()
    book.history = [(found, schedule.batch_size / schedule.samples, schedule.steps)]
    spent = book.get_epsilon(delta=delta)
    assert found == pytest.approx(opacus, rel=0.01)
    assert epsilon - EPSILON_TOLERANCE <= spent <= epsilon


def test_more_noise_for_less_epsilon_more_steps_and_less_delta() -> None:
    def found(epsilon: float = 2.0, delta: float = 1e-5, steps: int = 200) -> float:
        return find_noise_multiplier(Schedule(10_000, 100, steps), epsilon, delta, "rdp")

    usual = found()
    assert found(epsilon=4) < usual < found(epsilon=1)
    assert found(delta=1e-4) < usual < found(delta=1e-6)
    assert found(steps=100) < usual < found(steps=400)


def test_prv_asks_for_less_noise_than_rdp() -> None:
    schedule = Schedule(10_000, 100, 200)

    prv, rdp = (find_noise_multiplier(schedule, 2, 1e-5, name) for name in ("prv", "rdp"))

    assert 0.8 * rdp < prv < rdp


def test_an_epsilon_that_rdp_cannot_tell_is_beyond_its_reach_and_not_beyond_prvs() -> None:
    schedule = Schedule(10_000, 100, 20)
    with pytest.raises(BeyondReachError, match=r"^rdp knows no noise multiplier for epsilon 0.1 "):
        find_noise_multiplier(schedule, 0.1, 1e-7, "rdp")

    found = find_noise_multiplier(schedule, 0.1, 1e-7, "prv")

    assert 0.099 <= spend(schedule, found, 1e-7, "prv") <= 0.1


@pytest.fixture
def quick(monkeypatch) -> None:
    """An accountant by the central limit theorem of Bu et al. 2020, in closed form."""

    def spent(of: Schedule, noise_multiplier: float, delta: float, _accountant: str) -> float:
        root = of.sample_rate * math.sqrt(of.steps * math.expm1(noise_multiplier**-2))
        return root**2 / 2 + root * math.sqrt(2 * math.log(1 / delta))

    for module in (noise, noise_multiplier):
        monkeypatch.setattr(module, "spend", spent)


def test_the_batch_of_another_epsilon_has_the_planned_noise_and_is_the_least(quick) -> None:
    samples, steps, delta = 1_000_000, 100, 1e-6
    multiplier = find_noise_multiplier(Schedule(samples, 2560, steps), 8, delta, "rdp")
    planned = describe_noise(Schedule(samples, 2560, steps), multiplier, None)
    privacy = make_privacy(samples=samples, delta=delta)

    found = find_batch_size(planned, privacy, 2)

    def spent(batch_size: int) -> float:
        at = Schedule(samples, batch_size, steps)
        return noise.spend(at, multiplier / 2560 * batch_size, delta, "rdp")

    assert found > 2560
    assert 2 - EPSILON_TOLERANCE <= spent(found) <= 2
    assert spent(int(0.98 * found)) > 2
    assert find_batch_size(planned, privacy, 16) < 2560


def test_noise_that_not_even_all_samples_average_out_is_beyond_reach() -> None:
    planned = describe_noise(Schedule(1000, 100, 100), 1.0, None)

    with pytest.raises(BeyondReachError, match=r"at epsilon 0.5: one of 1,000 still spends "):
        find_batch_size(planned, make_privacy(samples=1000, delta=1e-5), 0.5)


def make_privacy(**fields) -> Privacy:
    usual = {"samples": 100_000, "tokens": 10**8, "epsilon": [8], "delta": 1e-6}
    return Privacy.model_validate(usual | {"accountant": "rdp"} | fields)


def test_a_plan_has_batches_around_the_one_that_is_used(quick) -> None:
    plan = plan_noise(make_privacy(epsilon=[8, 6]), 32.0)

    assert plan.batch_size == 2048  # 1e8 / 32 / 1000 steps are 3,125 samples
    assert [one.batch_size for one in plan.batches] == [512, 1024, 2048, 4096, 8192]
    assert plan.planned.steps == 1526  # 1e8 / 32 / 2048, rounded up
    noises = [one.training_noise for one in plan.batches]
    assert noises == sorted(noises, reverse=True)
    first, other = plan.epsilons
    assert (first.epsilon, first.batch_size) == (8, 2048)
    assert other.noise_multiplier / other.batch_size == pytest.approx(plan.planned.step_noise)
    assert other.same_batch_noise_multiplier > first.noise_multiplier
    assert other.tokens == 1526 * other.batch_size * 32


def test_a_batch_that_was_given_is_used_whatever_its_steps(quick) -> None:
    plan = plan_noise(make_privacy(batch_size=20_000), 32.0)

    assert plan.batch_size == 20_000
    assert [one.batch_size for one in plan.batches] == [5000, 10_000, 20_000, 40_000, 80_000]
    assert plan.batches[-1].sample_rate == 0.8


def test_what_is_beyond_reach_is_null_with_the_reason() -> None:
    plan = plan_noise(make_privacy(epsilon=[0.01, 8]), 32.0)

    assert plan.planned.noise_multiplier is None
    assert "rdp knows no noise multiplier for epsilon 0.01" in plan.planned.reason
    assert [one.batch_size for one in plan.epsilons] == [None, None]
    assert all(one.reason for one in plan.epsilons)
