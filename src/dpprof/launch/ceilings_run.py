"""Measures a device's ceilings in a separate process, and always writes one file."""

import datetime as dt
import os
import time
from pathlib import Path
from typing import Literal

from dpprof.launch.isolated import UnansweredError, ask_child
from dpprof.launch.contention import Contention
from dpprof.launch.device_lock import hold_one, who_holds
from dpprof.launch.device_slots import DeviceSlot, cpu_slot, gpu_slots
from dpprof.planning.code_digest import ceilings_digest
from dpprof.planning.code_in_use import CodeInUse
from dpprof.records.ceilings import (
    SCHEMA_VERSION,
    Ceilings,
    Limits,
    nothing_measured,
    write_ceilings,
)
from dpprof.records.provenance import describe_surroundings
from dpprof.system.console import say
from dpprof.system.files import check_writable
from dpprof.system.hardware import available_cores, why_no_cuda

TIMEOUT_S = 120
"""Ceilings take about ten seconds; a device that takes longer than this counts as hung."""

_LIMITS = "dpprof.devices.limits"
_NO_GPU = DeviceSlot("cuda", lambda: {"type": "cuda", "name": None, "uuid": None}, {})


def measure_apart(device: Literal["cpu", "cuda"], output: Path) -> Ceilings:
    """Measure a device while no other run of dpprof uses it, and write one complete JSON.

    Args:
        device: The host's processor with all cores that dpprof may use, or a visible GPU.
        output: The file; written as a whole at the end.

    Raises:
        OSError: The file cannot be written; this is checked before the measurement.
    """
    check_writable(output)
    code = CodeInUse(ceilings_digest, __file__)
    cores = available_cores()
    slots = [cpu_slot(cores)] if device == "cpu" else gpu_slots(cores) or [_NO_GPU]
    names = [slot.lock_name for slot in slots]

    def waiting() -> None:
        say(f"an experiment is running on this device; waiting for {who_holds(names)}")

    with hold_one(names, waiting) as (position, lock_fd):
        code.start()
        slot = slots[position]
        description = slot.describe()
        provenance = describe_surroundings(os.environ | slot.environment)
        started_at = dt.datetime.now(dt.UTC)
        start, contention = time.monotonic(), Contention()
        limits = _ask_child(device, slot, lock_fd)
        wall_s, others = time.monotonic() - start, contention.busy_cores()
        digest = code.settle()
    return write_ceilings(
        output,
        {
            **limits.model_dump(),
            "schema_version": SCHEMA_VERSION,
            "device": description,
            "started_at": started_at.isoformat(timespec="microseconds"),
            "wall_s": wall_s,
            "others_busy_cores": others,
            "code_digest": digest,
            "provenance": provenance,
        },
    )


def _ask_child(device: str, slot: DeviceSlot, lock_fd: int) -> Limits:
    """Return the ceilings that a child measures; if it fails, null figures with the reason."""
    if device == "cuda" and (reason := why_no_cuda()):
        return nothing_measured(reason)
    try:
        limits: Limits = ask_child(
            "measurement",
            _LIMITS,
            "measure",
            device,
            timeout_s=TIMEOUT_S,
            lock_fd=lock_fd,
            environment=slot.environment,
        )
    except UnansweredError as error:
        return nothing_measured(str(error))
    return limits
