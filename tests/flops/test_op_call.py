"""Tests of descriptions of calls."""

import json

import pytest
import torch
from torch import Tensor

from dpprof.predict.flops.op_call import Layout, describe_call, read_call
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.recorder import Recorder

aten = torch.ops.aten
CPU = torch.device("cpu")


def zeros(layout: Layout) -> Tensor:
    return torch.zeros(layout.shape, dtype=layout.dtype).as_strided(layout.shape, layout.strides)


def describe(run) -> list[str]:
    """Describe each call of an operator."""
    with Recorder(is_there=lambda *_: True) as recorder:
        recorder.counting = recorder.describing = True
        run()
    return [event.call for event in recorder.events if isinstance(event, Op)]


def test_a_description_says_the_operator_and_all_that_its_time_depends_on() -> None:
    x = torch.ones(4, 3).t()

    described = describe_call(aten.add.Tensor, (x, [x, None]), {"alpha": 2, "device": CPU})

    layout = {"t": [[3, 4], [1, 3], "float32"]}
    assert json.loads(described) == ["aten.add.Tensor", [layout, [layout, None]], {"alpha": 2}]


def test_other_elements_make_the_same_call_and_other_layouts_another() -> None:
    x = torch.ones(4, 4)

    def describe_product(other: Tensor) -> str:
        return describe_call(aten.mm.default, (other, x), {})

    assert describe_product(x) == describe_product(x + 1)
    assert len(set(map(describe_product, (x, x.t(), x.double(), x[:2])))) == 4


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.nn.functional.layer_norm(torch.ones(2, 8), (8,)),
        lambda: torch.ones(3, 4).to(torch.bfloat16, memory_format=torch.contiguous_format),
        lambda: torch._foreach_add([torch.ones(2), torch.ones(3)], 1.0),
        lambda: torch.randn(4, 5),
        lambda: torch.ones(6)[torch.tensor([0, 5])],
        lambda: torch.cat([torch.ones(2, 1), torch.ones(2, 3)], dim=1),
    ],
)
def test_a_call_that_is_made_again_is_described_alike(run) -> None:
    def repeat() -> None:
        for call in first:
            function, args, kwargs = read_call(call, zeros, CPU)
            function(*args, **kwargs)

    first = describe(run)

    assert [call for call in describe(repeat) if call in first] == first


@pytest.mark.parametrize(
    ("run", "bound"),
    [
        (lambda ids: torch.nn.functional.embedding(ids, torch.ones(7, 2)), 7),
        (lambda ids: torch.gather(torch.ones(3, 9), 1, ids.view(1, -1)), 9),
        (lambda ids: torch.ones(5, 2).index_select(0, ids), 5),
        (lambda ids: torch.nn.functional.nll_loss(torch.ones(2, 4), ids), 4),
    ],
)
def test_positions_stay_below_the_size_that_they_point_into(run, bound) -> None:
    bounds = []

    def make(layout: Layout) -> Tensor:
        if layout.dtype is torch.int64:
            bounds.append(layout.bound)
        return zeros(layout)

    for call in describe(lambda: run(torch.tensor([0, 1]))):
        read_call(call, make, CPU)

    assert bound in bounds


def test_an_operator_that_this_pytorch_lacks_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no_such_operator"):
        read_call('["aten.no_such_operator.default", [], {}]', zeros, CPU)
