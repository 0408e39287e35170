"""Energy of a GPU over a window of steps, by the driver's counter."""

import math
import time
from collections.abc import Callable

import pynvml

from dpprof.records.result import Energy
from dpprof.system.hardware import nvml, visible_gpus

WINDOW_S = 2.0
"""The counter moves in strides of up to a tenth of a second, so a window this long is known to a
twentieth; one shorter than a stride reads zero (ml-energy/zeus says so of its windows)."""

SOURCE = "NVML, nvmlDeviceGetTotalEnergyConsumption"


class NoEnergyError(Exception):
    """There is no counter, or it does not count; says why."""


def measure_energy(
    run: Callable[[], None], synchronize: Callable[[], None], step_s: float
) -> Energy:
    """Run as many steps as a window holds, and read what they used up.

    It is the whole GPU's, idle power included. Steps follow one another as timed ones do: the
    device is waited for at both ends alone.

    Args:
        run: Runs one step.
        synchronize: Waits until the device has done what it was given.
        step_s: About how long a step takes.

    Raises:
        NoEnergyError: The counter cannot be read, or did not move.
    """
    steps = math.ceil(WINDOW_S / step_s)
    gpu = next(iter(visible_gpus()), None)
    with nvml() as available:
        if gpu is None or not available:
            raise NoEnergyError("NVML shows no GPU")
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            synchronize()
            before_mj, start_s = _read_mj(handle), time.perf_counter()
            for _ in range(steps):
                run()
            synchronize()
            window_s, used_mj = time.perf_counter() - start_s, _read_mj(handle) - before_mj
        except pynvml.NVMLError as error:
            raise NoEnergyError(f"NVML cannot read the energy counter: {error}") from error
    if window_s < WINDOW_S / 2:
        raise NoEnergyError(f"a window of {window_s:.1f} s is too short for the counter")
    if used_mj <= 0:
        raise NoEnergyError(f"the energy counter did not move in {window_s:.1f} s")
    joules_per_step = used_mj / 1e3 / steps
    return Energy(joules_per_step=joules_per_step, window_s=window_s, steps=steps, source=SOURCE)


def _read_mj(handle: object) -> int:
    return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
