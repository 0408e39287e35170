"""Tables of traces: time by phase and op kind, with recorded FLOPs and bytes.

Operators of one kind in a phase are compute bound if their FLOPs would take longer than their
bytes at the device's measured ceilings, else memory bound (Williams et al. 2009, "Roofline"). All
their time counts as bound by that, even if it is far from the ceiling. Time in which nothing runs
is idle.
"""

from collections import Counter
from typing import Any

from dpprof.experiments.config.target import Dtype
from dpprof.experiments.records.ceilings import Ceilings, device_name, find_ceilings
from dpprof.experiments.records.result import Launched, Result
from dpprof.experiments.records.step_costs import Work
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.groups import RECORDERS
from dpprof.results.analysis.tables.axes import axes_of, key_of
from dpprof.results.analysis.tables.frames import pick


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
        roof = _find_roof(ceilings, result.experiment.dtype)
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


def _find_roof(ceilings: Ceilings | None, dtype: Dtype) -> dict[str, Any]:
    """Return the device's measured ceilings for a dtype, as columns."""
    if ceilings is None:
        return {}
    products, copies = ceilings.matmul.get(dtype), ceilings.bandwidth
    return {
        "ceiling_flops_per_s": products and products.flops_per_s,
        "ceiling_bytes_per_s": copies and copies.bytes_per_s,
        "ceilings_of": device_name(ceilings.device),
    }


def _kernel_row(launched: Launched, work: Work | None, roof: dict[str, Any]) -> dict[str, Any]:
    """Return what ran, beside the work that was recorded for the same phase and op kind."""
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
