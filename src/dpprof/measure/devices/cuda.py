"""A CUDA device: the caching allocator's counters, events on the stream, the driver's energy."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pynvml
import torch

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Dtype
from dpprof.experiments.records.result import Energy
from dpprof.measure.devices.device import AllocatorPeaks, Counters, Device, NoEnergyError
from dpprof.private.errors import UnsupportedError
from dpprof.system.hardware import nvml, visible_gpus

WINDOW_S = 2.0
"""The driver updates the counter about every tenth of a second, so the error of this window is at
most a twentieth; a window shorter than an update reads zero (as documented by ml-energy/zeus)."""

SOURCE = "NVML, nvmlDeviceGetTotalEnergyConsumption"


_AMPERE = (8, 0)


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
        """Allow or forbid TF32 in products and convolutions of float32.

        Raises:
            UnsupportedError: ``tf32`` on a GPU older than Ampere, which ignores it.
        """
        if dtype == "tf32" and torch.cuda.get_device_capability() < _AMPERE:
            raise UnsupportedError("dtype tf32 needs a GPU of compute capability 8.0 or newer")
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = dtype == "tf32"

    def counters(self) -> Counters:
        """Read ``memory_allocated`` and ``memory_reserved``."""
        return Counters(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks to its present counters."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._retries_before = torch.cuda.memory_stats()["num_alloc_retries"]

    def peaks(self) -> AllocatorPeaks:
        """Read the allocator's peaks, its retries, and the device's memory in use."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return AllocatorPeaks(
            allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.max_memory_reserved(),
            device_used_bytes=total - free,
            alloc_retries=torch.cuda.memory_stats()["num_alloc_retries"] - self._retries_before,
        )

    def energy(self, run: Callable[[], object], step_s: float) -> Energy:
        """Read the driver's counter before and after a window of steps.

        The energy is the whole GPU's, with idle power. As in timed steps, the host waits for the
        device only at both ends of the window.
        """
        steps = math.ceil(WINDOW_S / step_s)
        gpu = next(iter(visible_gpus()), None)
        with nvml() as available:
            if gpu is None or not available:
                raise NoEnergyError("NVML shows no GPU")
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                self.synchronize()
                before_mj, start_s = _read_mj(handle), time.perf_counter()
                for _ in range(steps):
                    run()
                self.synchronize()
                window_s, used_mj = time.perf_counter() - start_s, _read_mj(handle) - before_mj
            except pynvml.NVMLError as error:
                raise NoEnergyError(f"NVML cannot read the energy counter: {error}") from error
        if window_s < WINDOW_S / 2:
            raise NoEnergyError(f"a window of {window_s:.1f} s is too short for the counter")
        if used_mj <= 0:
            raise NoEnergyError(f"the energy counter did not move in {window_s:.1f} s")
        return Energy(
            joules_per_step=used_mj / 1e3 / steps, window_s=window_s, steps=steps, source=SOURCE
        )

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream, without waiting."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def durations_s(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Wait for the device once, then return the seconds between events, host gaps included."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(marks)]


def _read_mj(handle: object) -> int:
    return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
