"""Measures a device's ceilings in a separate process, and always writes one file."""

from pathlib import Path
from typing import Literal

from dpprof.launch.device_slots import DeviceSlot, cpu_slot, gpu_slots
from dpprof.launch.isolated import Isolation, isolate
from dpprof.planning.code_digest import ceilings_digest
from dpprof.records.ceilings import SCHEMA_VERSION, Ceilings, Limits, nothing_measured
from dpprof.records.record import write_record
from dpprof.system.hardware import available_cores, why_no_cuda

TIMEOUT_S = 120
"""Ceilings take about ten seconds; a device that takes longer than this counts as hung."""

_MEASURE = "dpprof.devices.limits:measure"
_NO_GPU = DeviceSlot("cuda", lambda: {"type": "cuda", "name": None, "uuid": None}, {})


def measure_apart(device: Literal["cpu", "cuda"], output: Path) -> Ceilings:
    """Measure a device while no other run of dpprof uses it, and write one complete JSON.

    ``cpu`` has all cores that dpprof may use; ``cuda`` is one visible GPU.

    Raises:
        OSError: The file cannot be written; this is checked before the measurement.
    """
    cores = available_cores()
    slots = [cpu_slot(cores)] if device == "cpu" else gpu_slots(cores) or [_NO_GPU]
    with isolate(output, slots, ceilings_digest, __file__) as isolation:
        isolation.begin()
        limits, others = _measure(device, isolation)
        facts = isolation.finish()
    fields = facts | limits.model_dump() | {"others_busy_cores": others}
    return write_record(output, Ceilings, fields | {"schema_version": SCHEMA_VERSION})


def _measure(device: str, isolation: Isolation) -> tuple[Limits, float | None]:
    """Return ceilings, and how many cores others kept busy; null ceilings with the reason."""
    if device == "cuda" and (reason := why_no_cuda()):
        return nothing_measured(reason), None
    ended = isolation.run(Limits, _MEASURE, device, timeout_s=TIMEOUT_S)
    limits = ended.answer or nothing_measured(ended.explain("measurement", TIMEOUT_S))
    return limits, ended.others_busy_cores
