"""The host as a device: a wall clock, a memory limit, and an allocator without counters.

PyTorch's CPU allocator reports every allocation and release to torch.profiler, so the peaks of a
recording are exact. Earlier allocations are unknown, so a process makes one recording, which starts
before the model exists.
"""

import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Dtype
from dpprof.experiments.records.result import Energy
from dpprof.measure.devices.device import (
    AllocatorPeaks,
    AllocatorRecorder,
    Counters,
    Device,
    NoEnergyError,
    Recorded,
)
from dpprof.measure.devices.gloo_threads import settled_collectives
from dpprof.private.errors import UnsupportedError

_WINDOW = "dpprof window:"
_MARK = "dpprof mark:"


class CpuRecorder(AllocatorRecorder):
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
            return Counters()

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
        changes.sort(key=itemgetter(0))
        instants = [at_ns for at_ns, _ in changes]
        levels = list(accumulate((size for _, size in changes), initial=0))
        """Allocated bytes before the first change and after each."""

        def after(at_ns: int) -> int:
            return bisect_right(instants, at_ns)

        return Recorded(
            peaks={
                name: AllocatorPeaks(max(levels[after(start_ns) : after(end_ns) + 1]))
                for start_ns, end_ns, name in sorted(windows)
            },
            counters={name: Counters(levels[after(at_ns)]) for at_ns, name in sorted(marks)},
        )


_NO_POOL = "PyTorch's CPU allocator reserves nothing and retries nothing"
_NO_COUNTER = "PyTorch's CPU allocator keeps no counters; the instrument phases follows it"


class Cpu(Device):
    """The host's processor and memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.reasons_recorded = {
            "memory.peak_reserved_bytes": _NO_POOL,
            "memory.snapshots.reserved_bytes": _NO_POOL,
            "memory.peak_device_used_bytes": "the CPU has no memory apart from the host's",
            "memory.alloc_retries": _NO_POOL,
        }
        self.reasons = self.reasons_recorded | {
            "memory.peak_allocated_bytes": _NO_COUNTER,
            "memory.first_step_peak_allocated_bytes": _NO_COUNTER,
            "memory.snapshots.allocated_bytes": _NO_COUNTER,
        }

    def prepare(self, experiment: Experiment) -> None:
        """Limit the process's private writable memory.

        The limit is RLIMIT_DATA: an allocation beyond it fails with "can't allocate memory", as on
        a host without more memory. The compute threads start before the limit applies, because
        OpenMP ends the process if it cannot allocate a thread's stack.
        """
        if experiment.memory_limit_bytes is not None:
            torch.ones(2**20).sum()
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(experiment.memory_limit_bytes), hard))

    def use_precision(self, dtype: Dtype) -> None:
        """Refuse tf32; the CPU computes products of float32 in IEEE's precision."""
        if dtype == "tf32":
            raise UnsupportedError("a mode of CUDA matrix products")

    def recorder(self) -> CpuRecorder:
        """Record the allocator's work by the profiler."""
        return CpuRecorder()

    def energy(self, run: Callable[[], object], step_s: float) -> Energy:  # noqa: ARG002 (what a device offers)
        """Refuse, because NVML counts the energy of GPUs only."""
        raise NoEnergyError("NVML counts the energy of NVIDIA GPUs, and this is a CPU")
