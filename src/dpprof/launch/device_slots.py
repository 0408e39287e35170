"""Where a measurement can run: what to lock, what to call it, and how to make it the only one."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dpprof.system.hardware import describe_cpu, describe_gpu, visible_gpus


class DeviceSlot(NamedTuple):
    """A device, as the process around a measurement sees it."""

    lock_name: str
    describe: Callable[[], dict[str, Any]]
    environment: dict[str, str]
    """Variables of the measuring process, which leave it this device alone."""

    uuid: str | None = None
    """Of a GPU."""


def cpu_slot(threads: int) -> DeviceSlot:
    """Return the host's processor, on so many threads."""
    return DeviceSlot("cpu", partial(describe_cpu, threads), _threads(threads))


def gpu_slots(threads: int) -> list[DeviceSlot]:
    """List the visible GPUs that are interchangeable, with so many threads on the host.

    They are those like the first: GPUs of another model, or with other memory, are other
    devices, whose figures must not be mixed with its.
    """
    visible = visible_gpus()
    return [
        DeviceSlot(
            f"cuda-{gpu.uuid}",
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
