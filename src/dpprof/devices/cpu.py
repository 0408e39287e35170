"""The host: a wall clock, no allocator counters, a memory limit that is real."""

import resource
import time
from collections.abc import Callable

import torch

from dpprof.devices.allocations import CpuRecorder
from dpprof.devices.device import Counters, Device, Peaks, StepClock
from dpprof.devices.energy import NoEnergyError
from dpprof.records.result import Energy
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError
from dpprof.spec.target import Dtype

_NO_POOL = "PyTorch's CPU allocator reserves nothing and retries nothing"
_NO_COUNTER = "PyTorch's CPU allocator keeps no counters; the instrument phases follows it"


class WallClock(StepClock):
    """``time.perf_counter``: CPU operators return when they are done."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def tick(self) -> None:
        """Mark this instant."""
        self._marks.append(time.perf_counter())

    def durations_s(self) -> list[float]:
        """Return the seconds between successive marks."""
        return [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)]


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

        The limit is RLIMIT_DATA: an allocation beyond it fails with "can't allocate
        memory", just as on a host that has no more. The compute threads start before it
        holds, because OpenMP ends the process where it cannot make a thread's stack.
        """
        if experiment.memory_limit_bytes is not None:
            torch.ones(2**20).sum()
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(experiment.memory_limit_bytes), hard))

    def use_precision(self, dtype: Dtype) -> None:
        """Leave products as they are: those of float32 are IEEE's."""
        if dtype == "tf32":
            raise UnsupportedError("a mode of CUDA matrix products")

    def counters(self) -> Counters:
        """Return nothing: there are none."""
        return Counters(None, None)

    def reset_peaks(self) -> None:
        """Do nothing: there are none."""

    def peaks(self) -> Peaks:
        """Return nothing: there are none."""
        return Peaks(None, None, None, None)

    def recorder(self) -> CpuRecorder:
        """Have the profiler follow the allocator."""
        return CpuRecorder()

    def energy(self, run: Callable[[], None], step_s: float) -> Energy:  # noqa: ARG002 (what a device offers)
        """Refuse: NVML counts for GPUs alone."""
        raise NoEnergyError("NVML counts the energy of NVIDIA GPUs, and this is a CPU")

    def synchronize(self) -> None:
        """Do nothing: CPU operators return when they are done."""

    def clock(self) -> StepClock:
        """Make a wall clock."""
        return WallClock()
