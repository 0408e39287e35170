"""Tests of operators that are called again to be timed."""

import pytest
import torch

from dpprof.devices.cpu import Cpu
from dpprof.flops.op_call import Layout, describe_call
from dpprof.step_time.replay import Replayer

aten = torch.ops.aten


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    return Replayer(Cpu(), budget_s=0.02)


def test_tensors_have_their_layout_and_elements_that_differ(replayer) -> None:
    made = replayer.make(Layout((3, 5), (1, 3), torch.float32, 1))

    assert (made.shape, made.stride(), made.dtype) == ((3, 5), (1, 3), torch.float32)
    assert made.unique().numel() == 15


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), ()])
def test_tensors_without_or_with_one_element_are_made(replayer, shape) -> None:
    strides = torch.empty(shape).stride()
    assert replayer.make(Layout(shape, strides, torch.float32, 1)).shape == shape


def test_positions_are_below_their_bound_and_reach_it(replayer) -> None:
    made = replayer.make(Layout((1000,), (1,), torch.int64, 7))
    assert set(made.tolist()) == set(range(7))


def test_an_expanded_axis_takes_no_memory(replayer) -> None:
    made = replayer.make(Layout((1000, 4), (0, 1), torch.float32, 1))
    assert made.untyped_storage().nbytes() == 4 * 4


def test_an_operator_that_does_a_thousand_times_the_work_takes_longer(replayer) -> None:
    def time(size: int) -> float:
        x = torch.empty(size, size)
        return replayer.time(describe_call(aten.mm.default, (x, x), {}))

    assert time(640) > 10 * time(64) > 0


def test_arguments_that_an_operator_refuses_are_an_error(replayer) -> None:
    call = describe_call(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        replayer.time(call)
