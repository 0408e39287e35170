"""Steps, sample rates, and which batch is chosen."""

import pytest

from dpprof.experiments.accounting.plan import (
    batches_around,
    choose_batch,
    describe_noise,
    largest_batch,
    schedule,
)
from dpprof.experiments.config.privacy import Privacy
from dpprof.private.accounting.schedule import Schedule


def make_privacy(**fields) -> Privacy:
    usual = {"samples": "1e6", "tokens": "2e9", "epsilon": 8, "delta": "1e-7"}
    return Privacy.model_validate(usual | fields)


def test_steps_are_rounded_up_and_each_draws_its_share() -> None:
    found = schedule(make_privacy(), 1024.0, 4096)

    assert found.steps == 477  # 2e9 / (4,096 x 1,024) = 476.8
    assert found.sample_rate == 0.004096


def test_noise_of_a_step_and_of_the_training() -> None:
    found = describe_noise(Schedule(1000, 50, 100), 2.0, None)

    assert found.step_noise == 2 / 50
    assert found.training_noise == pytest.approx(2 / 50 / 10)


@pytest.mark.parametrize(
    ("fields", "largest"),
    [
        ({}, 1024),  # 2e9 / 1,024 / 1,000 = 1,953
        ({"least_steps": 100}, 16_384),
        ({"samples": 700}, 512),  # all samples
        ({"tokens": 1_024_000}, 1),
    ],
)
def test_the_largest_batch_leaves_the_least_steps(fields, largest) -> None:
    assert largest_batch(make_privacy(**fields), 1024.0) == largest


def test_batches_around_are_halves_and_doubles_that_the_data_allow() -> None:
    assert batches_around(8, 10**6) == [2, 4, 8, 16, 32]
    assert batches_around(6, 12) == [3, 6, 12]
    assert batches_around(1, 1) == [1]


def noises(*training: float):
    """Invent batches of 1, 2, 4 ... with these noises in one step each."""
    return [
        describe_noise(Schedule(100, 2**power, 1), noise * 2**power, None)
        for power, noise in enumerate(training)
    ]


@pytest.mark.parametrize(
    ("training", "chosen"),
    [
        ((4.0, 3.0, 2.0, 1.0), 4),  # the largest that is allowed
        ((4.0, 2.05, 2.0, 1.0), 2),  # within 5 %
        ((2.01, 2.005, 2.0, 1.0), 1),
    ],
)
def test_the_smallest_batch_with_nearly_the_least_noise_is_chosen(training, chosen) -> None:
    assert choose_batch(noises(*training), largest=4) == chosen


def test_without_any_noise_the_largest_batch_is_chosen() -> None:
    unknown = [describe_noise(Schedule(100, 4, 1), None, "beyond reach")]

    assert choose_batch(unknown, largest=4) == 4
