"""The recorder accounts for the backward that runs without it.

PyTorch writes in place where no dispatch mode is active, and copies where one is
(``isTensorSubclassLike``): in backward of lookups and selections, and where gradients of a
tensor that is used twice are added up. Each case runs bare, recorded and under fake tensors; the
allocator's own events decide.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpprof.measure.devices.cpu import CpuRecorder
from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.timeline import MemoryTimeline
from dpprof.predict.tracing import tracing

ROWS, WIDTH, TOKENS = 700, 96, 50


def _residual_stream(table: Tensor, _: Tensor) -> Tensor:
    hidden = table.exp()
    for _step in range(3):
        hidden = hidden + hidden.tanh()
    return hidden


def _used_twice_by_views(table: Tensor, _: Tensor) -> Tensor:
    hidden = table.exp()
    return hidden.t().sin().t() + hidden[:, :WIDTH].tanh()


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda table, ids: table[ids],
    "index_select": lambda table, ids: table.index_select(0, ids),
    "take": lambda table, ids: table.take(ids),
    "gather": lambda table, ids: table.gather(0, ids[:, None].expand(-1, WIDTH)),
    "max": lambda table, _: table.max(1).values,
    "topk": lambda table, _: table.topk(3, 1).values,
    "residual stream": _residual_stream,
    "used twice by views": _used_twice_by_views,
    # Sums within a backward formula, and none of the engine's.
    "of unlike sizes": lambda table, _: nn.functional.cosine_similarity(
        table, table[:1].detach(), dim=1
    ),
}


def _train(case: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH, requires_grad=True)
    ids = torch.randint(ROWS, (TOKENS,))
    out = case(table, ids)
    out.backward(torch.ones(out.shape))
    assert table.grad is not None
    return table.grad


def _peak(recorder: Recorder) -> int:
    return MemoryTimeline(recorder, {}, (0, len(recorder.events))).peak_bytes


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
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
