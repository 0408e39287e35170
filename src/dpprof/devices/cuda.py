"""A CUDA device, with the caching allocator's counters and events on the stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dpprof.devices.device import Counters, Device, Peaks, Recorded, Recorder, StepClock
from dpprof.devices.energy import measure_energy
from dpprof.records.result import Energy
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError
from dpprof.spec.target import Dtype

_AMPERE = (8, 0)


class EventClock(StepClock):
    """CUDA events: a step lasts from one mark to the next, with gaps on the host."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def tick(self) -> None:
        """Record an event on the current stream, without waiting."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def durations_s(self) -> list[float]:
        """Wait for the device once, then return the seconds between successive marks."""
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


class CudaRecorder(Recorder):
    """Keeps the caching allocator's counters, which are always exact."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._recorded = Recorded({}, {})

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Record the peaks inside the context."""
        self._device.reset_peaks()
        yield
        self._recorded.peaks[name] = self._device.peaks()

    def read(self, name: str) -> Counters:
        """Read the counters."""
        counters = self._recorded.counters[name] = self._device.counters()
        return counters

    def close(self) -> Recorded:
        """Return the recorded peaks and counters."""
        return self._recorded


class Cuda(Device):
    """The one GPU that the supervisor left visible."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.reasons = self.reasons_recorded = {}
        self._retries_before = 0

    def prepare(self, experiment: Experiment) -> None:
        """Set the precision of matrix products and the memory limit."""
        self.use_precision(experiment.dtype)
        if experiment.memory_limit_bytes is not None:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            share = min(1.0, int(experiment.memory_limit_bytes) / total)
            torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def use_precision(self, dtype: Dtype) -> None:
        """Allow or forbid TF32 in products of float32.

        Raises:
            UnsupportedError: ``tf32`` on a GPU older than Ampere, which ignores it.
        """
        if dtype == "tf32" and torch.cuda.get_device_capability() < _AMPERE:
            raise UnsupportedError("dtype tf32 needs a GPU of compute capability 8.0 or newer")
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")

    def counters(self) -> Counters:
        """Read ``memory_allocated`` and ``memory_reserved``."""
        return Counters(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks to its present counters."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._retries_before = torch.cuda.memory_stats()["num_alloc_retries"]

    def peaks(self) -> Peaks:
        """Read the allocator's peaks, its retries, and the device's memory in use."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return Peaks(
            allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.max_memory_reserved(),
            device_used_bytes=total - free,
            alloc_retries=torch.cuda.memory_stats()["num_alloc_retries"] - self._retries_before,
        )

    def recorder(self) -> CudaRecorder:
        """Return a recorder of the allocator's counters."""
        return CudaRecorder(self)

    def energy(self, run: Callable[[], None], step_s: float) -> Energy:
        """Read the driver's counter before and after a window of steps."""
        return measure_energy(run, self.synchronize, step_s)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def clock(self) -> StepClock:
        """Return an event clock."""
        return EventClock()
