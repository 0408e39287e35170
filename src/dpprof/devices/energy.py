"""Energy of a GPU over a window of steps, by the driver's counter."""

import time
from collections.abc import Callable

import pynvml

from dpprof.hardware import visible_gpus
from dpprof.result import Energy

WINDOW_S = 2.0
"""The counter moves in strides of up to a tenth of a second, so a window this long is known to a
twentieth; one shorter than a stride reads zero (ml-energy/zeus says so of its windows)."""

SOURCE = "NVML, nvmlDeviceGetTotalEnergyConsumption"


class NoEnergyError(Exception):
    """There is no counter, or it does not count; says why."""


def measure_energy(run: Callable[[], None], synchronize: Callable[[], None]) -> Energy:
    """Run steps until the window is over, and read what they used up.

    It is the whole GPU's, idle power included.

    Args:
        run: Runs one step.
        synchronize: Waits until the device has done what it was given.

    Raises:
        NoEnergyError: The counter cannot be read, or did not move.
    """
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(visible_gpus()[0].uuid)
        synchronize()
        before_mj, start_s, steps = _read_mj(handle), time.perf_counter(), 0
        while time.perf_counter() - start_s < WINDOW_S:
            run()
            synchronize()
            steps += 1
        used_mj, window_s = _read_mj(handle) - before_mj, time.perf_counter() - start_s
    except pynvml.NVMLError as error:
        raise NoEnergyError(f"NVML cannot read the energy counter: {error}") from error
    if used_mj <= 0:
        raise NoEnergyError(f"the energy counter did not move in {window_s:.1f} s")
    joules = used_mj / 1e3
    return Energy(joules_per_step=joules / steps, window_s=window_s, steps=steps, source=SOURCE)


def _read_mj(handle: object) -> int:
    return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
