"""The interface of a device, as the instruments see it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Dtype
from dpprof.experiments.records.result import Energy


class Counters(NamedTuple):
    """The allocator's present counters in bytes; None where it has none."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class AllocatorPeaks(NamedTuple):
    """Peaks and retries since ``reset_peaks``, and the device memory in use now."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    alloc_retries: int | None = None


class NoEnergyError(Exception):
    """There is no usable energy counter; the message says why."""


class Recorded(NamedTuple):
    """The peaks of windows and the counters of instants in a recording, by name."""

    peaks: dict[str, AllocatorPeaks]
    counters: dict[str, Counters]


class AllocatorRecorder:
    """Records the allocator's counters, which are exact on a device that has them."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._recorded = Recorded({}, {})

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Record the peaks inside the context."""
        self._device.reset_peaks()
        yield
        self._recorded.peaks[name] = self._device.peaks()

    def read(self, name: str) -> Counters:
        """Record the counters of this instant, and return them if they are known already."""
        counters = self._recorded.counters[name] = self._device.counters()
        return counters

    def close(self) -> Recorded:
        """End the recording and return all its windows and instants."""
        return self._recorded


class Device(ABC):
    """A device on which experiments run."""

    torch_device: torch.device
    reasons: dict[str, str]  # why counters of ``memory`` are null on this device, by dotted key
    reasons_recorded: dict[str, str]  # why counters are null even with a recorder

    @abstractmethod
    def prepare(self, experiment: Experiment) -> None:
        """Set the precision and the memory limit, before anything is allocated."""

    @abstractmethod
    def use_precision(self, dtype: Dtype) -> None:
        """Set how matrix products of float32 are computed.

        Raises:
            UnsupportedError: The device has no such products.
        """

    def counters(self) -> Counters:
        """Return the allocator's counters."""
        return Counters()

    def reset_peaks(self) -> None:  # noqa: B027 (a device without counters has none to reset)
        """Reset the peaks to the present counters."""

    def peaks(self) -> AllocatorPeaks:
        """Return the peaks since ``reset_peaks``."""
        return AllocatorPeaks()

    def recorder(self) -> AllocatorRecorder:
        """Start a recording, before the model exists and once in a process."""
        return AllocatorRecorder(self)

    def mark(self) -> Any:
        """Mark this instant on the device's time line, at low cost."""
        return time.perf_counter()

    def durations_s(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds between successive marks, after waiting for the device."""
        return [end - start for start, end in pairwise(marks)]

    def time(self, act: Callable[[], object], repeats: int) -> list[float]:
        """Repeat an action back to back and return the seconds of each repeat."""
        self.synchronize()
        marks = [self.mark()]
        for _ in range(repeats):
            act()
            marks.append(self.mark())
        return self.durations_s(marks)

    @abstractmethod
    def energy(self, run: Callable[[], object], step_s: float) -> Energy:
        """Return the energy of a step, measured over several.

        ``run`` runs one step, which takes about ``step_s``.

        Raises:
            NoEnergyError: The device has no energy counter, or it cannot be read.
        """

    def synchronize(self) -> None:  # noqa: B027 (CPU operators return when they are done)
        """Wait until the device has finished its work."""


def time_repeats(
    time: Callable[[int], list[float]], budget_s: float, most: int = 1_000
) -> list[float]:
    """Time repeats of an action, after one to warm up, until the budget is used, or ``most``.

    ``time`` returns the seconds of each of a number of repeats. The number doubles between reads of
    the clock, because a read makes the host wait for the device.
    """
    time(1)
    seconds = time(1)
    while sum(seconds) < budget_s and len(seconds) < most:
        seconds += time(len(seconds))
    return seconds
