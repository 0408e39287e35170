"""Which machine a result was measured on: numbers of two machines have no common median."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from dpprof.records.result import Result
from dpprof.spec.registry import PREDICTIONS


def hardware_of(result: Result) -> str | None:
    """Name the processor with its cores, or the kind of GPU, that a result was measured on.

    None for a prediction, which is the same wherever it is made.
    """
    if result.instrument in PREDICTIONS:
        return None
    device = result.device
    cores = f", {device.get('cores')} cores" if device.get("type") == "cpu" else ""
    return f"{device.get('name')}{cores}"


def machine_of(result: Result) -> str | None:
    """Name the same, with the threads that a processor computed with if nobody asked for them."""
    hardware, device = hardware_of(result), result.device
    threads = device.get("threads")
    told = device.get("type") == "cpu" and threads != device.get("cores")
    if hardware is None or not told or result.experiment.cpu_threads:
        return hardware
    return f"{hardware}, {threads} threads"


def find_usual_machines(results: Iterable[Result]) -> Mapping[str, str]:
    """Return the machine that most results with a device were measured on, by the device asked for.

    Of two with as many results it is the one that comes first.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        machine = machine_of(result)
        if machine is not None and result.outcome == "ok":
            counts[result.experiment.device][machine] += 1
    return {device: seen.most_common(1)[0][0] for device, seen in counts.items()}
