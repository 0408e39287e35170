"""Measures a device's ceilings in a separate process, and always writes one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dpprof.experiments.launch.device_slots import DeviceSlot, cpu_slot, gpu_slots
from dpprof.experiments.launch.isolated import Isolation, isolate
from dpprof.experiments.planning.code_digest import ceilings_digest
from dpprof.experiments.records.ceilings import Ceilings, Limits, OperatorTable, nothing_measured
from dpprof.experiments.records.record import write_record
from dpprof.system.hardware import available_cores, why_no_cuda

OPERATORS_S = 120
"""About how many seconds the operators of all experiments may take; only the last one may exceed
it."""

CEILINGS_TIMEOUT_S = 120
"""Ceilings take about ten seconds; a device that takes longer than this counts as hung."""

_MEASURE = "dpprof.measure.devices.limits:measure"
_TIME_OPERATORS = "dpprof.measure.instruments.operators:measure"
_NO_GPU = DeviceSlot(("cuda",), lambda: {"type": "cuda", "name": None, "uuid": None}, {})


def measure_apart(
    device: Literal["cpu", "cuda"],
    output: Path,
    specs: Sequence[Path] = (),
    operators_s: int = OPERATORS_S,
) -> Ceilings:
    """Measure a device while no other run of dpprof uses it, and write one complete JSON.

    ``cpu`` has all cores that dpprof may use; ``cuda`` is one visible GPU.

    On a processor the operators of the experiments in ``specs`` are timed too, in about
    ``operators_s`` seconds.

    Raises:
        OSError: The file cannot be written; this is checked before the measurement.
    """
    cores = available_cores()
    slots = [cpu_slot(cores)] if device == "cpu" else gpu_slots(cores) or [_NO_GPU]
    with isolate(output, slots, ceilings_digest, __file__) as isolation:
        isolation.begin()
        limits, others = _measure(device, isolation)
        operators, why_not = _time_operators(device, isolation, specs, operators_s)
        facts = isolation.finish()
    fields = facts | limits.model_dump() | {"others_busy_cores": others, "operators": operators}
    fields["reasons"] |= why_not
    return write_record(output, Ceilings, fields)


def _measure(device: str, isolation: Isolation) -> tuple[Limits, float | None]:
    """Return ceilings, and how many cores others kept busy; null ceilings with the reason."""
    if device == "cuda" and (reason := why_no_cuda()):
        return nothing_measured(reason), None
    ended = isolation.run(Limits, _MEASURE, device, timeout_s=CEILINGS_TIMEOUT_S)
    limits = ended.answer or nothing_measured(ended.explain("measurement", CEILINGS_TIMEOUT_S))
    return limits, ended.others_busy_cores


def _time_operators(
    device: str, isolation: Isolation, specs: Sequence[Path], budget_s: int
) -> tuple[OperatorTable | None, dict[str, str]]:
    """Return the times of experiments' operators, or why there are none."""
    if not specs:
        return None, {"operators": "no experiment was named"}
    if device != "cpu":
        return None, {"operators": "operators are timed on processors alone"}
    longest_s = 2 * budget_s + 600
    names = [str(path.resolve()) for path in specs]
    ended = isolation.run(OperatorTable, _TIME_OPERATORS, budget_s, *names, timeout_s=longest_s)
    if ended.answer is None:
        return None, {"operators": ended.explain("timing of operators", longest_s)}
    return ended.answer, {}
