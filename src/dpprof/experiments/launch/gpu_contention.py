"""Measures other processes' use of a GPU while dpprof does not use it."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import pynvml

from dpprof.experiments.records.result import Failure, Others
from dpprof.system.hardware import nvml

SAMPLE_S = 1.0
"""The driver averages load over a second at most, so after this time it excludes our own load."""

_GIB = 2**30


def look_at(uuid: str | None) -> Others:
    """Return the driver's figures on a GPU whose lock this process holds; None is the CPU.

    Of several GPUs, whose UUIDs have commas between them, it is the one that others use most.
    """
    if uuid is None:
        return Others(reason="not on a GPU; see others_busy_cores for the processor")
    if "," in uuid:
        each = map(look_at, uuid.split(","))
        return max(each, key=lambda gpu: (gpu.matter, gpu.memory_bytes or 0, gpu.load or 0.0))
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


def judge_use(
    uuids: Sequence[str | None], seconds: float, otherwise: Literal["run", "refuse"]
) -> Callable[[int, int], str | None] | None:
    """Return a function that says who else uses a GPU whose lock this process holds, if anybody.

    It gets the GPU's position and how many before it were in use; ``hold_one`` calls it. Unknown
    use counts as none. Once others have had ``seconds`` to leave a GPU since they were first seen,
    it is taken in spite of them; with ``refuse``, only if others use every GPU, because one that
    dpprof itself uses will become free. None where others' use does not matter.
    """
    if otherwise == "run" and not seconds:
        return None
    # An own run that was killed is seen for a moment more, so nothing is refused at first sight.
    patience_s = max(seconds, SAMPLE_S) if otherwise == "refuse" else seconds
    seen_s: dict[int, float] = {}

    def judge(position: int, in_use: int) -> str | None:
        others, now_s = look_at(uuids[position]), time.monotonic()
        if not others.matter:
            seen_s.pop(position, None)
            return None
        seen_s.setdefault(position, now_s)
        counted = [position] if otherwise == "run" else range(len(uuids))
        all_in_use = otherwise == "run" or in_use == len(uuids) - 1
        if all_in_use and all(now_s - seen_s[index] >= patience_s for index in counted):
            return None
        return f"others, who {_tell_use(others)} of {uuids[position]}"

    return judge


def refuse_busy(others: Others, seconds: float) -> Failure:
    """Return why a run is refused on a GPU that others still use after the wait."""
    after = f" after a wait of {seconds:g} s" if seconds else ""
    message = (
        f"others {_tell_use(others)} of the GPU{after}, and busy_gpu is refuse; once they have "
        "left, dpprof forget --outcome unsupported, then snakemake"
    )
    return Failure(kind="BusyGpu", message=message)


def _tell_use(others: Others) -> str:
    """Return what others use, as ``hold 60.0 GiB and 37% of the time``."""
    memory, load = others.memory_bytes or 0, others.load or 0.0
    return f"hold {memory / _GIB:.1f} GiB and {load:.0%} of the time"


def tell_others(failure: Failure, before: Others, after: Others) -> Failure:
    """Return an out-of-memory failure with the device memory that other processes held."""
    sizes = {"before": before.memory_bytes, "after": after.memory_bytes}
    held = {when: size for when, size in sizes.items() if size is not None}
    if not held:
        return failure
    told = " and ".join(f"{size / _GIB:.2f} GiB {when} it" for when, size in held.items())
    message = f"{failure.message}; other processes held {told}"
    return failure.model_copy(update={"message": message, "others_bytes": max(held.values())})
