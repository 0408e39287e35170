"""Peaks of allocations whose sizes are known."""

import gc

import torch

from dpprof.measure.devices.cpu import CpuRecorder


def kilobytes(count: int) -> torch.Tensor:
    return torch.empty(250 * count)


def test_windows_and_marks_are_exact() -> None:
    gc.collect()
    before = kilobytes(7)
    recorder = CpuRecorder()
    with recorder.window("first"):
        a = kilobytes(1)
        kilobytes(4)
    recorder.read("between")
    c = kilobytes(2)
    with recorder.window("second"):
        pass
    with recorder.window("third"):
        recorder.read("inside")
        d = kilobytes(1).requires_grad_()
        del c
        (d * 2).sum().backward()
    with recorder.window("third_again"):
        del before, a
    recorder.read("twice")
    e = kilobytes(3)
    recorder.read("twice")
    recorded = recorder.close()
    peaks = {name: one.allocated_bytes for name, one in recorded.peaks.items()}
    counters = {name: one.allocated_bytes for name, one in recorded.counters.items()}

    assert set(peaks) == {"first", "second", "third", "third_again"}
    assert peaks["first"] == 1_000 + 4_000
    assert peaks["second"] == 1_000 + 2_000  # what is allocated when a window begins counts
    assert peaks["third"] >= 3_000 + 1_000
    # At the end d, its gradient and e are left; of a name the last mark counts.
    assert counters == {"between": 1_000, "inside": 3_000, "twice": 2_000 + e.nbytes}
    assert recorded.peaks["first"].reserved_bytes is None
