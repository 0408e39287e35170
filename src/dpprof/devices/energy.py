"""Measures the energy of a GPU over a window of steps, by the driver's counter."""

import math
import time
from collections.abc import Callable

import pynvml

from dpprof.records.result import Energy
from dpprof.system.hardware import nvml, visible_gpus

WINDOW_S = 2.0
"""The driver updates the counter about every tenth of a second, so the error of this window is at
most a twentieth; a window shorter than an update reads zero (as documented by ml-energy/zeus)."""

SOURCE = "NVML, nvmlDeviceGetTotalEnergyConsumption"


class NoEnergyError(Exception):
    """There is no usable energy counter; the message says why."""


def measure_energy(
    run: Callable[[], None], synchronize: Callable[[], None], step_s: float
) -> Energy:
    """Run steps for the length of a window and return the energy of one.

    The energy is the whole GPU's, with idle power. As in timed steps, the host waits for the device
    only at both ends of the window.

    A step takes about ``step_s``; ``synchronize`` waits until the device has finished.

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
