"""What others hold and do on a GPU, seen while nothing of dpprof's is on it."""

import time
from collections.abc import Callable
from contextlib import suppress

import pynvml

from dpprof.records.result import Failure, Others
from dpprof.system.hardware import nvml

SAMPLE_S = 1.0
"""The driver's load is over the last second at most; after so long none of ours is in it."""

_POLL_S = 1.0
_GIB = 2**30


def look_at(uuid: str | None) -> Others:
    """Ask the driver about a GPU that this process holds the lock of.

    Args:
        uuid: Of the GPU; None for the host's processor.
    """
    if uuid is None:
        return Others(reason="not on a GPU; others_busy_cores tells of the processor")
    with nvml() as available:
        if not available:
            return Others(reason="there is no NVML")
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used)
        except pynvml.NVMLError as error:
            return Others(reason=f"NVML: {error}")
        processes = None
        with suppress(pynvml.NVMLError):
            processes = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        try:
            load = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except pynvml.NVMLError as error:  # of a MIG slice there is none
            return Others(memory_bytes=used, processes=processes, reason=f"NVML: {error}")
        return Others(memory_bytes=used, load=load, processes=processes)


def look_afterwards(uuid: str | None) -> Others:
    """Do the same after a run, when its own load has passed."""
    if uuid is not None:
        time.sleep(SAMPLE_S)
    return look_at(uuid)


def wait_until_idle(uuid: str | None, seconds: float, waiting: Callable[[Others], None]) -> None:
    """Wait until others have left a GPU, or so long; what is not known is not waited for.

    Args:
        uuid: Of the GPU; None for the host's processor, which is not waited for.
        seconds: How long at most.
        waiting: Called once with what others do, if there is anything to wait for.
    """
    until, told = time.monotonic() + seconds, False
    while seconds and (others := look_at(uuid)).matter:
        if not told:
            waiting(others)
            told = True
        if time.monotonic() >= until:
            return
        time.sleep(_POLL_S)


def tell_others(failure: Failure, before: Others, after: Others) -> Failure:
    """Add to a failure for want of memory how much of the device others held."""
    held = [others.memory_bytes for others in (before, after) if others.memory_bytes is not None]
    if not held:
        return failure
    told = " and ".join(
        f"{others.memory_bytes / _GIB:.2f} GiB {when} it"
        for when, others in (("before", before), ("after", after))
        if others.memory_bytes is not None
    )
    message = f"{failure.message}; others held {told}"
    return failure.model_copy(update={"message": message, "others_bytes": max(held)})
