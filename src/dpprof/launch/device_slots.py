"""Devices that a measurement can run on, each with its locks, description and environment."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dpprof.launch.device_lock import Hold, Locks
from dpprof.system.hardware import describe_cpu, describe_gpu, visible_gpus


class DeviceSlot(NamedTuple):
    """A device, as the supervisor of a measurement needs it."""

    locks: Locks
    describe: Callable[[], dict[str, Any]]
    environment: dict[str, str]
    """Environment variables that restrict the measuring process to this device."""

    uuid: str | None = None
    """The UUID of a GPU."""


def cpu_slot(threads: int, *, shared: bool = False) -> DeviceSlot:
    """Return the host's processor with a number of threads.

    With ``shared``, for what measures nothing, others with ``shared`` may use it too.
    """
    locks = {"cpu": Hold.SHARED if shared else Hold.ALONE}
    return DeviceSlot(locks, partial(describe_cpu, threads), _threads(threads))


def gpu_slots(threads: int) -> list[DeviceSlot]:
    """Return the visible GPUs that are interchangeable, with a number of threads on the host.

    They have the same model and memory as the first GPU. Figures of other GPUs must not be mixed
    with theirs.
    """
    visible = visible_gpus()
    return [
        DeviceSlot(
            {f"cuda-{gpu.uuid}": Hold.ALONE},
            partial(describe_gpu, gpu),
            _threads(threads)
            | {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            gpu.uuid,
        )
        for gpu in visible
        if gpu[1:] == visible[0][1:]
    ]


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
