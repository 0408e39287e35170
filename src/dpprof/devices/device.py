"""The interface of a device, as the instruments see it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from dpprof.records.result import Energy
from dpprof.spec.experiment import Experiment
from dpprof.spec.target import Dtype


class Counters(NamedTuple):
    """The allocator's present counters in bytes; None where it has none."""

    allocated_bytes: int | None
    reserved_bytes: int | None


class AllocatorPeaks(NamedTuple):
    """AllocatorPeaks and retries since ``reset_peaks``, and the device memory in use now."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None
    alloc_retries: int | None


class NoEnergyError(Exception):
    """There is no usable energy counter; the message says why."""


class StepClock(ABC):
    """Marks instants on the device's time line at low cost."""

    @abstractmethod
    def tick(self) -> None:
        """Mark this instant."""

    @abstractmethod
    def durations_s(self) -> list[float]:
        """Return the seconds between successive marks, after waiting for the device."""


class Recorded(NamedTuple):
    """The peaks of windows and the counters of instants in a recording, by name."""

    peaks: dict[str, AllocatorPeaks]
    counters: dict[str, Counters]


class AllocatorRecorder(ABC):
    """Records the allocator's work from the start of a process, as exactly as possible."""

    @abstractmethod
    def window(self, name: str) -> AbstractContextManager[None]:
        """Record the peaks inside the context."""

    @abstractmethod
    def read(self, name: str) -> Counters:
        """Record the counters of this instant, and return them if they are known already."""

    @abstractmethod
    def close(self) -> Recorded:
        """End the recording and return all its windows and instants."""


class Device(ABC):
    """A device on which experiments run."""

    torch_device: torch.device
    reasons: dict[str, str]
    """Why counters of ``memory`` are null on this device, by dotted key."""

    reasons_recorded: dict[str, str]
    """Why counters are null even with a recorder."""

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
        return Counters(None, None)

    def reset_peaks(self) -> None:  # noqa: B027 (a device without counters has none to reset)
        """Reset the peaks to the present counters."""

    def peaks(self) -> AllocatorPeaks:
        """Return the peaks since ``reset_peaks``."""
        return AllocatorPeaks(None, None, None, None)

    @abstractmethod
    def recorder(self) -> AllocatorRecorder:
        """Start a recording, before the model exists and once in a process."""

    @abstractmethod
    def clock(self) -> StepClock:
        """Return a clock."""

    @abstractmethod
    def energy(self, run: Callable[[], None], step_s: float) -> Energy:
        """Return the energy of a step, measured over several.

        ``run`` runs one step, which takes about ``step_s``.

        Raises:
            NoEnergyError: The device has no energy counter, or it cannot be read.
        """

    def synchronize(self) -> None:  # noqa: B027 (CPU operators return when they are done)
        """Wait until the device has finished its work."""
