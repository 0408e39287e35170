"""The host as a device: a wall clock, a memory limit, and no allocator counters."""

import resource
import time
from collections.abc import Callable

import torch

from dpprof.devices.allocations import CpuRecorder
from dpprof.devices.device import Device, StepClock
from dpprof.devices.energy import NoEnergyError
from dpprof.records.result import Energy
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError
from dpprof.spec.target import Dtype

_NO_POOL = "PyTorch's CPU allocator reserves nothing and retries nothing"
_NO_COUNTER = "PyTorch's CPU allocator keeps no counters; the instrument phases follows it"


class WallClock(StepClock):
    """``time.perf_counter``, because CPU operators return when they are done."""

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

    def energy(self, run: Callable[[], None], step_s: float) -> Energy:  # noqa: ARG002 (what a device offers)
        """Refuse, because NVML counts the energy of GPUs only."""
        raise NoEnergyError("NVML counts the energy of NVIDIA GPUs, and this is a CPU")

    def clock(self) -> StepClock:
        """Return a wall clock."""
        return WallClock()
