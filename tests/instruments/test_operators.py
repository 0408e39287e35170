"""Operators that are called again to be timed, in rounds, and what a step takes beside them."""

import math
from types import SimpleNamespace

import pytest
import torch

from dpprof.experiments.config.experiment import Experiment
from dpprof.measure.devices.cpu import Cpu
from dpprof.measure.instruments import operators
from dpprof.measure.instruments.operators import (
    ROUNDS,
    OperatorTimer,
    list_ops,
    time_beside_operators,
    time_in_turn,
)
from dpprof.measure.instruments.replay import Replayer
from dpprof.predict.flops.cost import Cost
from dpprof.predict.flops.op_call import Layout, describe_call
from dpprof.predict.memory.events import Op

aten = torch.ops.aten


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    return Replayer(Cpu())


@pytest.mark.parametrize(
    ("shape", "strides", "nbytes"),
    [((3, 5), (1, 3), 60), ((1000, 4), (0, 1), 16), ((0,), (1,), 0), ((2, 0, 3), (3, 3, 1), 0)],
)
def test_tensors_have_their_layout_and_elements_that_differ(
    replayer, shape, strides, nbytes
) -> None:
    made = replayer.make(Layout(shape, strides, torch.float32, 1))

    assert (made.shape, made.stride(), made.dtype) == (shape, strides, torch.float32)
    assert made.untyped_storage().nbytes() == nbytes
    assert made.unique().numel() == nbytes // 4


def test_positions_are_below_their_bound_and_reach_it(replayer) -> None:
    made = replayer.make(Layout((1000,), (1,), torch.int64, 7))
    assert set(made.tolist()) == set(range(7))


def test_an_operator_that_does_a_thousand_times_the_work_takes_longer(replayer) -> None:
    def time(size: int) -> float:
        x = torch.empty(size, size)
        return replayer.time(describe_call(aten.mm.default, (x, x), {}))

    assert time(640) > time(64) > 0


def test_arguments_that_an_operator_refuses_are_an_error(replayer) -> None:
    call = describe_call(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        replayer.time(call)


CALLS = {n: describe_call(torch.ops.aten.neg.default, (torch.ones(n),), {}) for n in (1, 2, 3)}


class Invented:
    """Says that an operator of n elements takes n seconds, in each round 1.2 times as many."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def time(self, call: str) -> float:
        n = next(n for n, known in CALLS.items() if known == call)
        if n == 3:
            raise RuntimeError("no memory")
        self.asked.append(call)
        return n * 1.2 ** (self.asked.count(call) - 1)


@pytest.fixture
def timer() -> OperatorTimer:
    timer = OperatorTimer(Cpu())
    timer._replayer = Invented()
    cost = Cost("neg", "elementwise", 1, "float32")
    ops = [Op("forward", None, "neg", cost, [], [], 0.0, call) for call in CALLS.values()]
    timer.add(ops)
    timer.add(ops)
    timer.repeat()
    timer.repeat()
    return timer


def test_an_operator_takes_the_median_of_its_rounds_and_all_drift_alike(timer) -> None:
    found, drift = timer.tabulate()

    assert [one.seconds for one in found] == pytest.approx([1.2, 2.4])
    assert [one.spread for one in found] == pytest.approx([0, 0])
    assert drift == pytest.approx(math.log(1.2))
    assert list(timer.failed.values()) == ["neg: RuntimeError: no memory"]


def test_after_one_round_the_drift_is_unknown() -> None:
    assert OperatorTimer(Cpu()).tabulate() == ([], None)


TINY = {"standard": 3.0, "flash-bk": 4.0, "opacus-hooks": 6.0}
"""Seconds of the tiny model's step, whose 100 operators take 2 s together."""


@pytest.fixture
def machine(monkeypatch):
    """A machine on which small's step takes 13 s, and its 100 operators 10 s alone."""
    seen = SimpleNamespace(real_s=13.0, small=[])

    def time_in_turn(experiment, _ops, _steps, *, small):
        seen.small.append(small)
        seconds = seen.real_s if experiment.model == "small" else TINY[experiment.method]
        timer = SimpleNamespace(sum_up=lambda _: 2.0 if small else 10.0)
        return [9 * seconds, seconds, seconds], timer

    monkeypatch.setattr(operators, "time_in_turn", time_in_turn)
    monkeypatch.setattr(operators, "list_ops", lambda _: [None] * 100)
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
    steps, timer = time_in_turn(experiment, ops, 2, small=True)

    assert len(steps) == 2 * ROUNDS
    assert min(steps) > 0
    operators, drift = timer.tabulate()
    assert {one.op for one in operators} >= {"mm", "native_layer_norm"}
    assert drift is not None
    assert timer.sum_up(ops) > 0
