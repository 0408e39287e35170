"""The recorder accounts for the backward that runs without it.

PyTorch writes in place where no dispatch mode is active, and copies where one is
(``isTensorSubclassLike``): in backward of lookups and selections, and where gradients of a
tensor that is used twice are added up. Each case runs bare, recorded and under fake tensors; the
allocator's own events tell the truth.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from dpprof.devices.cpu import CpuRecorder
from dpprof.instruments.memory import tracing
from dpprof.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.memory.events import Allocated, Event, Freed
from dpprof.memory.recorder import Recorder

ROWS, WIDTH, TOKENS = 700, 96, 50


def _index(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


def _index_select(table: Tensor, ids: Tensor) -> Tensor:
    return table.index_select(0, ids)


def _take(table: Tensor, ids: Tensor) -> Tensor:
    return table.take(ids)


def _gather(table: Tensor, ids: Tensor) -> Tensor:
    return table.gather(0, ids[:, None].expand(-1, WIDTH))


def _max(table: Tensor, _: Tensor) -> Tensor:
    return table.max(1).values


def _topk(table: Tensor, _: Tensor) -> Tensor:
    return table.topk(3, 1).values


def _used_twice(table: Tensor, _: Tensor) -> Tensor:
    hidden = table.exp()
    return hidden.tanh() + hidden.sigmoid()


def _residual_stream(table: Tensor, _: Tensor) -> Tensor:
    hidden = table.exp()
    for _step in range(3):
        hidden = hidden + hidden.tanh()
    return hidden


def _used_twice_by_views(table: Tensor, _: Tensor) -> Tensor:
    hidden = table.exp()
    return hidden.t().sin().t() + hidden[:, :WIDTH].tanh()


def _of_unlike_sizes(table: Tensor, _: Tensor) -> Tensor:
    """Sums within a backward formula, and none of the engine's."""
    return nn.functional.cosine_similarity(table, table[:1].detach(), dim=1)


CASES: list[Callable[[Tensor, Tensor], Tensor]] = [
    _index,
    _index_select,
    _take,
    _gather,
    _max,
    _topk,
    _used_twice,
    _residual_stream,
    _used_twice_by_views,
    _of_unlike_sizes,
]


def _train(case: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH, requires_grad=True)
    ids = torch.randint(ROWS, (TOKENS,))
    out = case(table, ids)
    out.backward(torch.ones(out.shape))
    assert table.grad is not None
    return table.grad


def _peak(recorder: Recorder) -> int:
    return max(_totals(recorder, recorder.events))


def _totals(recorder: Recorder, events: Iterable[Event]) -> Iterable[int]:
    total = 0
    for event in events:
        match event:
            case Allocated(number):
                total += recorder.storages[number].nbytes
            case Freed(number):
                total -= recorder.storages[number].nbytes
        yield total


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_a_backward_is_recorded_as_it_runs_bare(case: Callable[[Tensor, Tensor], Tensor]) -> None:
    _train(case)  # whatever PyTorch sets up once
    allocator = CpuRecorder()
    with allocator.window("bare"):
        gradient = _train(case)
    bare = allocator.close().peaks["bare"].allocated_bytes
    with Recorder(is_there=lambda *_: True, workspaces=CPU_WORKSPACES) as recorder:
        recorded_gradient = _train(case)
    with tracing(None) as traced:
        _train(case)

    assert _peak(recorder) == bare
    assert _peak(traced) == bare
    assert torch.equal(recorded_gradient, gradient)
