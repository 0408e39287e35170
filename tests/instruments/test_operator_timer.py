"""Tests of the rounds in which operators are timed."""

import math

import pytest
import torch

from dpprof.devices.cpu import Cpu
from dpprof.flops.cost import Cost
from dpprof.flops.op_call import describe_call
from dpprof.instruments import operator_timer
from dpprof.instruments.operator_timer import OperatorTimer
from dpprof.memory.events import Op

CALLS = {n: describe_call(torch.ops.aten.neg.default, (torch.ones(n),), {}) for n in (1, 2, 3)}


class Replayed:
    """Says that an operator of n elements takes n seconds, in each round 1.2 times as many."""

    def __init__(self, *_: object, **__: object) -> None:
        self.asked: list[str] = []

    def time(self, call: str) -> float:
        n = next(n for n, known in CALLS.items() if known == call)
        if n == 3:
            raise RuntimeError("no memory")
        self.asked.append(call)
        return n * 1.2 ** (self.asked.count(call) - 1)


@pytest.fixture
def timer(monkeypatch) -> OperatorTimer:
    monkeypatch.setattr(operator_timer, "Replayer", Replayed)
    timer = OperatorTimer(Cpu())
    cost = Cost("neg", "elementwise", 1, "float32")
    ops = [Op("forward", None, "neg", cost, [], [], 0.0, call) for call in CALLS.values()]
    timer.add(ops)
    timer.add(ops)
    timer.repeat()
    timer.repeat()
    return timer


def test_an_operator_takes_the_median_of_its_rounds(timer) -> None:
    found, _ = timer.tabulate()
    assert [one.seconds for one in found] == pytest.approx([1.2, 2.4])


def test_a_machine_that_slows_down_for_all_operators_drifts(timer) -> None:
    found, drift = timer.tabulate()

    assert drift == pytest.approx(math.log(1.2))
    assert [one.spread for one in found] == pytest.approx([0, 0])


def test_an_operator_that_fails_is_left_out_with_its_reason(timer) -> None:
    assert list(timer.failed.values()) == ["neg: RuntimeError: no memory"]


def test_after_one_round_the_drift_is_unknown(monkeypatch) -> None:
    monkeypatch.setattr(operator_timer, "Replayer", Replayed)
    assert OperatorTimer(Cpu()).tabulate() == ([], None)
