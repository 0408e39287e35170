"""Devices that a measurement can run on, each with its locks, description and environment."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from dpprof.system.hardware import Gpu, describe_cpu, describe_gpu, interchangeable_gpus


class DeviceSlot(NamedTuple):
    """A device, as the supervisor of a measurement needs it."""

    locks: tuple[str, ...]  # names of locks, all of which a measurement holds
    describe: Callable[[], dict[str, Any]]
    environment: dict[str, str]
    """Environment variables that restrict the measuring process to this device."""

    uuid: str | None = None  # the UUID of a GPU; those of several, with commas
    shared: bool = False  # whether others that share the device may use it at the same time


def cpu_slot(threads: int, *, shared: bool = False) -> DeviceSlot:
    """Return the host's processor with a number of threads.

    With ``shared``, for what measures nothing, others with ``shared`` may use it too.
    """
    describe, limit = partial(describe_cpu, threads), _limit_threads(threads)
    return DeviceSlot(("cpu",), describe, limit, shared=shared)


def gpu_slots(threads: int, number: int = 1) -> list[DeviceSlot]:
    """Return the visible GPUs that are interchangeable, with a number of threads on the host.

    ``number`` neighbours together are one slot.
    """
    gpus, slots = interchangeable_gpus(), []
    for first in range(len(gpus) - number + 1):
        own = gpus[first : first + number]
        uuids = ",".join(gpu.uuid for gpu in own)
        environment = _limit_threads(threads)
        environment |= {"CUDA_VISIBLE_DEVICES": uuids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        locks = tuple(f"cuda-{gpu.uuid}" for gpu in own)
        slots.append(DeviceSlot(locks, partial(_describe, own), environment, uuids))
    return slots


def _describe(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Describe the first GPU; of several, say how many there are."""
    facts = describe_gpu(gpus[0])
    return facts if len(gpus) == 1 else facts | {"gpus": len(gpus)}


def _limit_threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
