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
    """What the allocator counts at this moment, in bytes; None where it counts nothing."""

    allocated_bytes: int | None
    reserved_bytes: int | None


class Peaks(NamedTuple):
    """High-water marks and retries since ``reset_peaks``; device memory in use just now."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None
    alloc_retries: int | None


class StepClock(ABC):
    """Marks instants on the device's own time line, as cheaply as it can be done."""

    @abstractmethod
    def tick(self) -> None:
        """Mark this instant."""

    @abstractmethod
    def durations_s(self) -> list[float]:
        """Return the seconds between successive marks, after waiting for the device."""


class Recorded(NamedTuple):
    """What a recording has seen: the peaks of windows and the counters of instants, by name."""

    peaks: dict[str, Peaks]
    counters: dict[str, Counters]


class Recorder(ABC):
    """Follows the allocator from the start of a process, as exactly as the device can."""

    @abstractmethod
    def window(self, name: str) -> AbstractContextManager[None]:
        """Find the peaks of what runs within."""

    @abstractmethod
    def read(self, name: str) -> Counters:
        """Read the counters of this instant, as far as they are known before the end."""

    @abstractmethod
    def close(self) -> Recorded:
        """End the recording; every name that met its instant or window is in what returns."""


class Device(ABC):
    """Where an experiment runs."""

    torch_device: torch.device
    reasons: dict[str, str]
    """Why counters of ``memory`` are null on this device, by dotted key."""

    reasons_recorded: dict[str, str]
    """Why they are null although a recorder followed the allocator."""

    @abstractmethod
    def prepare(self, experiment: Experiment) -> None:
        """Apply precision and the memory limit before anything is allocated."""

    @abstractmethod
    def use_precision(self, dtype: Dtype) -> None:
        """Choose how matrix products of float32 are computed.

        Raises:
            UnsupportedError: The device has no products of this kind.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """Read the allocator's counters."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Start the high-water marks anew."""

    @abstractmethod
    def peaks(self) -> Peaks:
        """Read the high-water marks since ``reset_peaks``."""

    @abstractmethod
    def recorder(self) -> Recorder:
        """Begin to follow the allocator; before the model exists, once in a process."""

    @abstractmethod
    def clock(self) -> StepClock:
        """Make a clock."""

    @abstractmethod
    def energy(self, run: Callable[[], None], step_s: float) -> Energy:
        """Find the energy of a step, which takes about ``step_s`` seconds, by running some.

        Raises:
            NoEnergyError: Nothing counts it here.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
