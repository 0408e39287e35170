"""Tables of what runs recorded: peaks, owners, traffic and costs of steps, and kernels of traces.

The allocator's peak checks the recorded and the estimated peak. It comes from another process,
which measured the same experiment. For a target, that process must have run on such a device.

MFU is FLOP/s as a share of the device's peak, by the FLOPs that the non-private step needs
(Chowdhery et al. 2022, "PaLM", appendix B). HFU counts the executed FLOPs. The peak is the dense
peak of the dtype in use: a GPU's is from its data sheet, a CPU's is the fastest matrix product
measured on it. Values above 1 stay as they are: they show that the FLOPs, the time or the peak is
wrong.

Operators of one kind in a phase are compute bound if their FLOPs would take longer than their
bytes at the device's measured ceilings, else memory bound (Williams et al. 2009, "Roofline"). All
their time counts as bound by that, even if it is far from the ceiling. Time in which nothing runs
is idle.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import CPU_TARGET, Dtype
from dpprof.experiments.records.ceilings import Ceilings, device_name, find_ceilings
from dpprof.experiments.records.reconciliation import JOINED, bound_bytes, reconcile
from dpprof.experiments.records.result import Launched, Result
from dpprof.experiments.records.step_costs import (
    AtPeak,
    Attribution,
    Compute,
    Io,
    Memory,
    Moved,
    Work,
    find_unknown_workspaces,
)
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.groups import RECORDERS, ExperimentRuns
from dpprof.results.analysis.tables.axes import axes_of, key_of
from dpprof.results.analysis.tables.frames import pick
from dpprof.system.files import canonical_json

NOT_TIMED = "no clean run measured the step time there"


class PeakFlops(NamedTuple):
    """The dense FLOP/s that utilisation is a share of."""

    flops_per_s: float | None
    source: str | None
    reason: str | None  # why there is no peak


def find_peak(
    compute: Compute, dtype: Dtype, device: Mapping[str, Any] | None, listed: Iterable[Ceilings]
) -> PeakFlops:
    """Return the peak of the dtype in use.

    ``device`` is where the step was timed, as its result describes it; None if it was not.
    """
    if compute.peak_flops_per_s is not None:
        return PeakFlops(compute.peak_flops_per_s, compute.peak_source, None)
    if device is None:
        return PeakFlops(None, None, NOT_TIMED)
    name = device.get("name")
    if device.get("type") != "cpu":
        return PeakFlops(None, None, f"dpprof has no data sheet of {name}")
    ceilings = find_ceilings(listed, device)
    if ceilings is None:
        return PeakFlops(None, None, f"the ceilings of {name} were not measured")
    measured = ceilings.matmul.get(dtype)
    if measured is None:
        reason = ceilings.reasons.get(f"matmul.{dtype}", "it was not measured")
        return PeakFlops(None, None, f"no {dtype} matrix product was measured on {name}: {reason}")
    source = f"the fastest {dtype} matrix product measured on {name}, n = {measured.size}"
    return PeakFlops(measured.flops_per_s, source, None)


def utilise(flops: float | None, step_s: float | None, peak: float | None) -> float | None:
    """Return the FLOP/s of a step as a share of the peak; None where an argument is unknown."""
    if flops is None or not step_s or not peak:
        return None
    return flops / step_s / peak


def list_memory(
    collected: Collected, groups: Sequence[ExperimentRuns]
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables of the runs that recorded or estimated memory, by name."""
    alike: dict[str, list[ExperimentRuns]] = defaultdict(list)
    for group in groups:
        if group.experiment.target is None:
            alike[_rest(group.experiment)].append(group)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run, result in collected.runs:
        memory, compute, io = result.memory, result.compute, result.io
        # The timeline of a capacity is for another batch size than the experiment's.
        if not (memory and memory.attribution and compute and io) or result.capacity:
            continue
        at_peak, key = memory.at_peak, key_of(run)
        assert at_peak is not None
        same = alike[_rest(result.experiment)]
        runs = next((group for group in same if _measures(group, result.experiment)), None)
        common = key | axes_of(result.experiment)
        rows["peaks"].append(common | _peak_row(result, memory, memory.attribution, at_peak, runs))
        rows["costs"].append(common | _cost_row(result, compute, io, runs, collected.ceilings))
        rows["owners"] += [
            key | {"component": component, "bytes": size}
            for component, size in at_peak.components.items()
        ]
        rows["holdings"] += [key | held.model_dump() for held in at_peak.largest]
        rows["traffic"] += [key | row for row in _traffic_rows(compute, io)]
    return rows


def _rest(experiment: Experiment) -> str:
    """Return an experiment as JSON without device and target, to join predictions on."""
    return canonical_json(experiment.model_dump(mode="json", exclude={"device", "target"}))


def _measures(group: ExperimentRuns, experiment: Experiment) -> bool:
    """Return whether a group is of this experiment, or of an equal one on its target's device."""
    if experiment.target is None:
        return group.experiment.id == experiment.id
    if experiment.target == CPU_TARGET or group.experiment.device == "cpu":
        return experiment.target == CPU_TARGET and group.experiment.device == "cpu"
    target = registry.find_gpu(experiment.target)
    return any(find_by_device_name(r.device.get("name")) == target for r in group.results)


def _peak_row(
    result: Result,
    memory: Memory,
    attribution: Attribution,
    at_peak: AtPeak,
    group: ExperimentRuns | None,
) -> dict[str, Any]:
    experiment, placed = result.experiment, memory.allocator
    if attribution.allocator_peak_bytes is None:
        is_allocated = group is not None and group.peaks.kind == "allocated"
        attribution = reconcile(
            experiment,
            attribution.timeline_peak_bytes,
            int(median(group.peaks.sizes)) if group is not None and is_allocated else None,
            attribution.evidence,
            attribution.rounding_bytes,
            unknown=find_unknown_workspaces(memory.assumed),
        )
    allocator = attribution.allocator_peak_bytes
    target = registry.find_gpu(experiment.target)
    reason = attribution.reason and attribution.reason.replace(
        JOINED, "no measurement to compare with"
    )
    return (
        pick("peaks", result.model, at_peak, placed, attribution)
        | {
            "target_memory_bytes": target and int(target.memory_bytes),
            "peak_bytes": attribution.timeline_peak_bytes,
            "first_step_peak_bytes": memory.first_step_peak_allocated_bytes,
            "unattributed_bytes": at_peak.components["unattributed"],
            "rounding_bytes": placed and attribution.rounding_bytes,
            "bound_bytes": None if allocator is None else bound_bytes(experiment, allocator),
            "reason": reason,
        }
        | {f"by_{kind}_bytes": size for kind, size in attribution.evidence.items()}
    )


def _cost_row(
    result: Result,
    compute: Compute,
    io: Io,
    group: ExperimentRuns | None,
    ceilings: Sequence[Ceilings],
) -> dict[str, Any]:
    step_s = median(group.step_s) if group is not None and group.step_s else None
    timed_on = None if group is None else group.timed_on
    peak = find_peak(compute, result.experiment.dtype, timed_on, ceilings)
    mfu = utilise(compute.model_flops, step_s, peak.flops_per_s)
    hfu = utilise(compute.executed_flops, step_s, peak.flops_per_s)
    predicted = None if result.time is None else result.time.predicted_step_s
    why = NOT_TIMED if step_s is None else peak.reason
    if compute.model_flops is None:
        why = why or "no formula is known for this model"
    return pick("costs", compute, io) | {
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "median_step_s": step_s,
        "predicted_step_s": predicted and predicted.median,
        "predicted_step_low_s": predicted and predicted.low,
        "predicted_step_high_s": predicted and predicted.high,
        "mfu": mfu,
        "hfu": hfu,
        "beyond_peak": None if hfu is None else max(mfu or 0.0, hfu) > 1,
        "utilisation_reason": why,
    }


def _traffic_rows(compute: Compute, io: Io) -> Iterator[dict[str, Any]]:
    by: dict[str, tuple[Mapping[Any, int], Mapping[Any, Moved]]] = {
        "phase": (compute.flops_by_phase, io.by_phase),
        "op_kind": ({}, io.by_op_kind),
        "component": (compute.flops_by_component, io.by_component),
    }
    for kind, (flops, moved) in by.items():
        for key, bytes_moved in moved.items():
            yield {
                "by": kind,
                "key": key,
                "flops": flops.get(key, 0) if flops else None,
                "read_bytes": bytes_moved.read,
                "written_bytes": bytes_moved.written,
            }


def list_kernels(collected: Collected) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of ``kernels`` (run, phase and op kind) and ``traces`` (run), by table."""
    recorded = {
        run.id: {(part.phase, part.op_kind): part for part in result.io.by_phase_and_op_kind}
        for instrument in reversed(RECORDERS)  # the preferred one comes last and wins
        for run, result in collected.runs
        if run.instrument == instrument and result.io
    }
    kernels, traces = [], []
    for run, result in collected.runs:
        if result.kernels is None:
            continue
        common = key_of(run) | axes_of(result.experiment) | pick("kernels", result.model)
        ceilings = find_ceilings(collected.ceilings, result.device)
        roof: dict[str, Any] = {}
        if ceilings is not None:
            products, copies = ceilings.matmul.get(result.experiment.dtype), ceilings.bandwidth
            roof["ceiling_flops_per_s"] = products and products.flops_per_s
            roof["ceiling_bytes_per_s"] = copies and copies.bytes_per_s
            roof["ceilings_of"] = device_name(ceilings.device)
        work: dict[Any, Work] = recorded.get(run.id, {})
        rows = [
            _kernel_row(part, work.get((part.phase, part.op_kind)), roof)
            for part in result.kernels.by_phase_and_op_kind
        ]
        bound_s: Counter[str] = Counter()
        for row in rows:
            bound_s[row.get("bound") or "unknown"] += row["seconds"]
        kernels += [common | row for row in rows]
        traces.append(
            common
            | pick("traces", result.kernels)
            | {f"{bound}_bound_s": float(bound_s[bound]) for bound in ("compute", "memory")}
            | {
                "unknown_s": float(bound_s["unknown"]),
                "host_to_device_bytes": _bytes_of(result, "HtoD"),
                "device_to_host_bytes": _bytes_of(result, "DtoH"),
                "launch_latency_s": ceilings and ceilings.launch_latency_s,
            }
        )
    return {"kernels": kernels, "traces": traces}


def _kernel_row(launched: Launched, work: Work | None, roof: dict[str, Any]) -> dict[str, Any]:
    row = launched.model_dump() | roof
    if work is None:
        return row
    moved, seconds = work.read + work.written, launched.seconds
    flops_per_s, bytes_per_s = roof.get("ceiling_flops_per_s"), roof.get("ceiling_bytes_per_s")
    bound = None  # where a ceiling is unknown
    if flops_per_s is not None and bytes_per_s is not None:
        bound = "compute" if work.flops / flops_per_s >= moved / bytes_per_s else "memory"
    return row | {
        "flops": work.flops,
        "read_bytes": work.read,
        "written_bytes": work.written,
        "arithmetic_intensity": work.flops / moved if moved else None,
        "flops_per_s": work.flops / seconds if seconds else None,
        "bytes_per_s": moved / seconds if seconds else None,
        "bound": bound,
    }


def _bytes_of(result: Result, direction: str) -> float | None:
    """Return the bytes copied in a direction; None on a CPU, which has no device to copy to."""
    if result.kernels is None or result.device.get("type") == "cpu":
        return None
    copied = result.kernels.copies.get(direction)
    return copied.bytes if copied else 0.0
