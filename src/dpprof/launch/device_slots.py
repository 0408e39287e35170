"""Devices that a measurement can run on, each with its lock, description and environment."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dpprof.system.hardware import describe_cpu, describe_gpu, interchangeable_gpus


class DeviceSlot(NamedTuple):
    """A device, as the supervisor of a measurement needs it."""

    lock_name: str
    describe: Callable[[], dict[str, Any]]
    environment: dict[str, str]
    """Environment variables that restrict the measuring process to this device."""

    uuid: str | None = None
    """The UUID of a GPU."""


def cpu_slot(threads: int) -> DeviceSlot:
    """Return the host's processor with a number of threads."""
    return DeviceSlot("cpu", partial(describe_cpu, threads), _threads(threads))


def gpu_slots(threads: int) -> list[DeviceSlot]:
    """Return the visible GPUs that are interchangeable, with a number of threads on the host."""
    return [
        DeviceSlot(
            f"cuda-{gpu.uuid}",
            partial(describe_gpu, gpu),
            _threads(threads)
            | {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            gpu.uuid,
        )
        for gpu in interchangeable_gpus()
    ]


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
