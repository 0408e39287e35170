"""Measures other processes' use of a GPU while dpprof does not use it."""

import time
from collections.abc import Callable
from contextlib import suppress

import pynvml

from dpprof.records.result import Failure, Others
from dpprof.system.hardware import nvml

SAMPLE_S = 1.0
"""The driver averages load over a second at most, so after this time it excludes our own load."""

_POLL_S = 1.0
_GIB = 2**30


def look_at(uuid: str | None) -> Others:
    """Return the driver's figures on a GPU whose lock this process holds; None is the CPU."""
    if uuid is None:
        return Others(reason="not on a GPU; see others_busy_cores for the processor")
    with nvml() as available:
        if not available:
            return Others(reason="NVML is not available")
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
        except pynvml.NVMLError as error:  # a MIG slice has no load figure
            return Others(memory_bytes=used, processes=processes, reason=f"NVML: {error}")
        return Others(memory_bytes=used, load=load, processes=processes)


def look_afterwards(uuid: str | None) -> Others:
    """Return the same after a run, once the driver's load excludes the run."""
    if uuid is not None:
        time.sleep(SAMPLE_S)
    return look_at(uuid)


def wait_until_idle(uuid: str | None, seconds: float, waiting: Callable[[Others], None]) -> None:
    """Wait until other processes have left a GPU; do not wait if their use is unknown.

    ``waiting`` is called once with the use by others, if there is a wait.
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
    """Return an out-of-memory failure with the device memory that other processes held."""
    known = {"before": before.memory_bytes, "after": after.memory_bytes}
    held = {when: size for when, size in known.items() if size is not None}
    if not held:
        return failure
    told = " and ".join(f"{size / _GIB:.2f} GiB {when} it" for when, size in held.items())
    message = f"{failure.message}; other processes held {told}"
    return failure.model_copy(update={"message": message, "others_bytes": max(held.values())})
