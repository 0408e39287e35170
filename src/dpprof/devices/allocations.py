"""The CPU allocator's exact peaks, from the allocations that torch.profiler sees.

PyTorch's CPU allocator keeps no counters, but tells the profiler of every allocation and
every release. What was allocated before the recording began is unknown to it, so one
recording serves one process, and begins before the model exists.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from dpprof.devices.base import Counters, Peaks, Recorded, Recorder

_LABEL = "dpprof:"


class _Event(NamedTuple):
    """Something that happened at an instant, in nanoseconds."""

    at_ns: int
    allocated_bytes: int


class CpuRecorder(Recorder):
    """One recording of one process."""

    def __init__(self) -> None:
        # No shapes and no stacks: with either, the profiler itself keeps tensors alive.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Find the peak of what runs within."""
        with record_function(f"{_LABEL}{name}"):
            yield

    def read(self, name: str) -> Counters:
        """Mark an instant; what was allocated then is known once the recording is closed."""
        with record_function(f"{_LABEL}{name}"):
            return Counters(None, None)

    def close(self) -> Recorded:
        """End the recording and add up what it saw."""
        self._profile.stop()
        assert self._profile.profiler is not None
        assert self._profile.profiler.kineto_results is not None
        sizes: list[_Event] = []
        marks: list[tuple[str, int, int]] = []
        event: Any  # the type's stub lacks what is used of it
        for event in self._profile.profiler.kineto_results.events():
            name = event.name()
            if name == "[memory]" and event.device_type().name == "CPU":
                sizes.append(_Event(event.start_ns(), event.nbytes()))
            elif name.startswith(_LABEL):
                marks.append((name.removeprefix(_LABEL), event.start_ns(), event.end_ns()))
        sizes.sort(key=lambda event: event.at_ns)
        totals = accumulate(event.allocated_bytes for event in sizes)
        levels = [_Event(event.at_ns, total) for event, total in zip(sizes, totals, strict=True)]
        marks.sort(key=lambda mark: mark[1])
        return Recorded(
            peaks={name: _peak(levels, start, end) for name, start, end in marks},
            counters={name: Counters(_level(levels, start), None) for name, start, _ in marks},
        )


def _level(levels: list[_Event], at_ns: int) -> int:
    """Say how much was allocated at an instant."""
    earlier = [level.allocated_bytes for level in levels if level.at_ns <= at_ns]
    return earlier[-1] if earlier else 0


def _peak(levels: list[_Event], start_ns: int, end_ns: int) -> Peaks:
    """Find the most that was allocated between two instants, the first included."""
    within = [level.allocated_bytes for level in levels if start_ns <= level.at_ns <= end_ns]
    peak = max([_level(levels, start_ns), *within])
    return Peaks(peak, reserved_bytes=None, device_used_bytes=None, alloc_retries=None)
