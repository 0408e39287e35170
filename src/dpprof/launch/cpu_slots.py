"""Slots of the processor: disjoint cores, so that several measurements run beside one another.

Slots keep out what uses the whole processor, and predictions too, since these may use any core.
"""

import os
import re
from functools import partial

from dpprof.launch.device_lock import Hold
from dpprof.launch.device_slots import PREDICTING, SLOTTED, DeviceSlot, limit_threads
from dpprof.spec.validation import refuse
from dpprof.system.hardware import describe_cpu, neighbouring_cores

_VARIABLE = "DPPROF_CPU_SLOTS"


def count_cpu_slots(stated: str | None = None) -> int:
    """Return into how many slots the processor is divided; 1 is the usual, the whole of it.

    ``stated``, the value of ``--cpu-slots``, comes before ``DPPROF_CPU_SLOTS``.

    Raises:
        InputError: The value is no number of slots; the message names option or variable.
    """
    for key, text in (("--cpu-slots", stated), (_VARIABLE, os.environ.get(_VARIABLE))):
        if text:
            most = max(1, len(neighbouring_cores()))
            if not (re.fullmatch("[0-9]{1,6}", text) and 1 <= int(text) <= most):
                raise refuse(key, text, f"it must be from 1 to {most}, the number of cores here")
            return int(text)
    return 1


def cpu_slots(number: int, stated: int | None = None, most: int | None = None) -> list[DeviceSlot]:
    """Return slots of the processor, of as many cores each; cores that are left over stay idle.

    Each core has a lock too, so that two sweeps with other numbers of slots share no core.

    Args:
        number: How many slots; at most one for each core.
        stated: The threads of a measurement; None: as many as a slot has cores.
        most: The most threads where they are not stated.

    Returns:
        The slots; none where more threads are stated than a slot has cores.
    """
    cores = neighbouring_cores()
    size = len(cores) // number
    threads = stated or min(most or size, size)
    parts = [tuple(cores[first : first + size]) for first in range(0, number * size, size)]
    shared = {"cpu": Hold.SHARED, SLOTTED: Hold.SHARED, PREDICTING: Hold.NOBODY}
    return [
        DeviceSlot(
            shared | {f"cpu-core-{core}": Hold.ALONE for core in part},
            partial(describe_cpu, threads, part),
            limit_threads(threads),
            cores=part,
        )
        for part in parts
        if threads <= size
    ]
