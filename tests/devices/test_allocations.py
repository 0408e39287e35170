"""Peaks of allocations whose sizes are known; each in a process of its own."""

import json

import pytest
from fresh_process import run_fresh

CODE = """
import json, torch
from dpprof.devices.allocations import CpuRecorder
KILO = lambda n: torch.empty(250 * n)
before = KILO(7)
recorder = CpuRecorder()
with recorder.window("first"):
    a = KILO(1); b = KILO(4); del b
recorder.read("between")
c = KILO(2)
with recorder.window("second"):
    pass
with recorder.window("third"):
    recorder.read("inside")
    d = torch.autograd.Variable(KILO(1), requires_grad=True)
    del c
    (d * 2).sum().backward()
with recorder.window("third_again"):
    del before, a
recorder.read("twice")
e = KILO(3)
recorder.read("twice")
recorded = recorder.close()
print(json.dumps([{n: p.allocated_bytes for n, p in recorded.peaks.items()},
                  {n: c.allocated_bytes for n, c in recorded.counters.items()},
                  recorded.peaks["first"].reserved_bytes]))
"""


@pytest.fixture(scope="module")
def recorded():
    return json.loads(run_fresh(CODE))


def test_windows_and_marks_are_exact(recorded) -> None:
    peaks, counters, reserved = recorded

    assert peaks["first"] == 1_000 + 4_000
    assert counters["between"] == 1_000
    assert peaks["second"] == 1_000 + 2_000  # what lives when a window begins counts
    assert counters["inside"] == 3_000
    assert peaks["third"] >= 3_000 + 1_000
    assert counters["twice"] == 3_000 + 2_000  # d, its gradient and e; the last mark of a name
    assert reserved is None


def test_windows_have_peaks_and_marks_have_counters(recorded) -> None:
    peaks, counters, _ = recorded

    assert set(peaks) == {"first", "second", "third", "third_again"}
    assert set(counters) == {"between", "inside", "twice"}
