"""The CPU allocator's exact peaks, from the allocations that torch.profiler records.

PyTorch's CPU allocator has no counters, but reports every allocation and release to the profiler.
Earlier allocations are unknown, so a process makes one recording, which starts before the model
exists.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from dpprof.devices.device import Counters, Peaks, Recorded, Recorder
from dpprof.devices.gloo_threads import settled_collectives

_WINDOW = "dpprof window:"
_MARK = "dpprof mark:"


class _Level(NamedTuple):
    """The allocated bytes from an instant until the next level."""

    since_ns: int
    allocated_bytes: int


class CpuRecorder(Recorder):
    """A recording by the profiler, one for each process."""

    def __init__(self) -> None:
        # With shapes or stacks the profiler itself would keep tensors alive.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()
        self._settling = ExitStack()
        self._settling.enter_context(settled_collectives())

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Record the peak inside the context."""
        with record_function(f"{_WINDOW}{name}"):
            yield

    def read(self, name: str) -> Counters:
        """Mark this instant; its counters are known once the recording is closed."""
        with record_function(f"{_MARK}{name}"):
            return Counters(None, None)

    def close(self) -> Recorded:
        """End the recording and return its peaks and counters."""
        self._settling.close()
        self._profile.stop()
        assert self._profile.profiler is not None
        assert self._profile.profiler.kineto_results is not None
        changes: list[tuple[int, int]] = []
        windows: list[tuple[int, int, str]] = []
        marks: list[tuple[int, str]] = []
        event: Any  # the type's stub is incomplete
        for event in self._profile.profiler.kineto_results.events():
            name, start_ns = event.name(), event.start_ns()
            if name == "[memory]" and event.device_type().name == "CPU":
                changes.append((start_ns, event.nbytes()))
            elif name.startswith(_WINDOW):
                windows.append((start_ns, event.end_ns(), name.removeprefix(_WINDOW)))
            elif name.startswith(_MARK):
                marks.append((start_ns, name.removeprefix(_MARK)))
        levels = _add_up(changes)
        return Recorded(
            peaks={name: _peak(levels, start, end) for start, end, name in sorted(windows)},
            counters={name: _counters(levels, at_ns) for at_ns, name in sorted(marks)},
        )


def _add_up(changes: Iterable[tuple[int, int]]) -> list[_Level]:
    """Return levels from instants and bytes, negative for releases; the first level is empty."""
    ordered = sorted(changes, key=itemgetter(0))
    totals = accumulate((size for _, size in ordered), initial=0)
    return [_Level(*level) for level in zip([0, *(at for at, _ in ordered)], totals, strict=True)]


def _position(levels: Sequence[_Level], at_ns: int) -> int:
    """Return the position of an instant's level: the last that begins no later."""
    return bisect_right(levels, at_ns, key=attrgetter("since_ns")) - 1


def _counters(levels: Sequence[_Level], at_ns: int) -> Counters:
    return Counters(levels[_position(levels, at_ns)].allocated_bytes, reserved_bytes=None)


def _peak(levels: Sequence[_Level], start_ns: int, end_ns: int) -> Peaks:
    """Return the peak between two instants, including the level at the first."""
    within = levels[_position(levels, start_ns) : _position(levels, end_ns) + 1]
    peak = max(level.allocated_bytes for level in within)
    return Peaks(peak, reserved_bytes=None, device_used_bytes=None, alloc_retries=None)
