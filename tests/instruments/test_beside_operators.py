"""Tests of what a step takes besides its operators."""

import math
from types import SimpleNamespace

import pytest

from dpprof.instruments import beside_operators
from dpprof.instruments.beside_operators import MeasuredStep, time_beside_operators
from dpprof.instruments.operator_timer import ROUNDS, list_ops
from dpprof.spec.experiment import Experiment

TINY = {"standard": 3.0, "flash-bk": 4.0, "opacus-hooks": 6.0}
"""Seconds of the tiny model's step, whose 100 operators take 2 s together."""


@pytest.fixture
def machine(monkeypatch):
    """A machine on which small's step takes 13 s, and its 100 operators 10 s alone."""
    seen = SimpleNamespace(real_s=13.0, small=[])

    class Measured:
        def __init__(self, experiment, _ops, *, small) -> None:
            seen.small.append(small)
            self.seconds = seen.real_s if experiment.model == "small" else TINY[experiment.method]
            self.timer = SimpleNamespace(sum_up=lambda _: 2.0 if small else 10.0)

        def time(self, _steps: int) -> list[float]:
            return [9 * self.seconds, self.seconds, self.seconds]

    monkeypatch.setattr(beside_operators, "MeasuredStep", Measured)
    monkeypatch.setattr(beside_operators, "list_ops", lambda _: [None] * 100)
    return seen


def test_the_hosts_time_is_of_tiny_steps_and_the_factor_of_a_real_one(machine) -> None:
    found = time_beside_operators()

    assert found.host_s == pytest.approx((4 - 2) / 100)
    steps = [math.log(seconds / 2) for seconds in (1, 2, 4)]
    assert found.host_spread == pytest.approx(math.sqrt(sum(one**2 for one in steps) / 3))
    assert found.step_factor == pytest.approx((13 - 100 * 0.02) / 10)
    assert machine.small == [True, True, True, False]


def test_a_step_that_is_faster_than_its_operators_is_not_hidden(machine) -> None:
    machine.real_s = 8.0
    assert time_beside_operators().step_factor == pytest.approx(0.6)


def test_a_step_and_its_operators_are_timed_in_turn() -> None:
    experiment = Experiment.model_validate(
        {"model": "tiny", "method": "standard", "batch_size": 1, "seq_len": 8, "device": "cpu"}
    )
    ops = list_ops(experiment)
    measured = MeasuredStep(experiment, ops, small=True)
    steps = measured.time(2)

    assert len(steps) == 2 * ROUNDS
    assert min(steps) > 0
    operators, drift = measured.timer.tabulate()
    assert {one.op for one in operators} >= {"mm", "native_layer_norm"}
    assert drift is not None
    assert measured.timer.sum_up(ops) > 0
