"""Numbers that PyTorch wraps in tensors: what is recorded equals the allocator's peak."""

import operator

import pytest
import torch
from memory_steps import workspaces

from dpprof.measure.devices.cpu import CpuRecorder
from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.timeline import MemoryTimeline

N = 1000


def peaks(run, dtype=torch.float32) -> tuple[int, int, Recorder]:
    """Return the bytes that a call takes at once, bare and recorded."""
    x = torch.full((N,), 3, dtype=dtype)
    run(x.clone())  # whatever PyTorch sets up once
    own, allocator = x.clone(), CpuRecorder()
    with allocator.window("bare"):
        kept = run(own)
    bare = allocator.close().peaks["bare"].allocated_bytes
    own = x.clone()
    with Recorder(is_there=lambda *_: True, workspaces=CPU_WORKSPACES) as recorder:
        kept = run(own)  # noqa: F841 (it stays)
    timeline = MemoryTimeline(recorder, {}, (0, len(recorder.events)))
    return bare, timeline.peak_bytes, recorder


CALLS = {
    "x / 3.0": lambda x: x / 3.0,
    "x * 2": lambda x: x * 2,
    "x + 1.0": lambda x: x + 1.0,
    "1.0 - x": lambda x: 1.0 - x,
    "x - 1": lambda x: x - 1,
    "x > 0": lambda x: x > 0,
    "x == 2.5": lambda x: x == 2.5,
    "x // 2": lambda x: x // 2,
    "x % 2": lambda x: x % 2,
    "x /= 3.0": lambda x: operator.itruediv(x.clone(), 3.0),
    "x *= 0.5": lambda x: operator.imul(x.clone(), 0.5),
    "two tensors": lambda x: x * x,
    "x ** 2": lambda x: x**2,
    "clamp": lambda x: x.clamp(max=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_number_takes_is_recorded_to_the_byte(call, dtype) -> None:
    bare, recorded, _ = peaks(CALLS[call], dtype)

    assert recorded == bare


def test_a_number_is_a_tensor_of_eight_bytes_and_its_copy_one_of_the_results_dtype() -> None:
    assert workspaces(peaks(lambda x: x / 3.0)[2]) == [8, 4]
    assert workspaces(peaks(lambda x: x / 3.0, torch.bfloat16)[2]) == [8, 2]
    assert workspaces(peaks(lambda x: x / 3.0, torch.float64)[2]) == [8]
    assert workspaces(peaks(lambda x: x * x)[2]) == []


def test_adamw_peaks_at_a_division_by_a_number() -> None:
    """Its denominator, one over a square root, is the largest tensor beside what stays."""

    def step(x) -> torch.optim.Optimizer:
        p = torch.nn.Parameter(torch.zeros(N))
        p.grad = x
        optimizer = torch.optim.AdamW([p], foreach=False)
        optimizer.step()
        return optimizer

    bare, recorded, _ = peaks(step)

    assert recorded == bare
