"""Tables of traces: time by phase and op kind, with recorded FLOPs and bytes.

Operators of one kind in a phase are compute bound if their FLOPs would take longer than their
bytes at the device's measured ceilings, else memory bound (Williams et al. 2009, "Roofline"). All
their time counts as bound by that, even if it is far from the ceiling. Time in which nothing runs
is idle.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from dpprof.analysis.collection import Collected
from dpprof.analysis.selection import RECORDERS
from dpprof.analysis.tables.axes import axes_of, key_of
from dpprof.analysis.tables.frames import make_frame, pick
from dpprof.planning.planner import PlannedRun
from dpprof.records.ceilings import Ceilings, device_name, find_ceilings
from dpprof.records.result import Kernels, Result
from dpprof.records.step_costs import Work


class Roof(NamedTuple):
    """The measured ceilings of a device for one dtype; None where unknown."""

    flops_per_s: float | None
    bytes_per_s: float | None
    device: str | None


class _Traced(NamedTuple):
    """A traced run, with the FLOPs and bytes that were recorded for its experiment."""

    run: PlannedRun
    result: Result
    kernels: Kernels
    work: Mapping[tuple[Any, Any], Work]
    roof: Roof
    launch_latency_s: float | None


def tabulate_kernels(collected: Collected) -> dict[str, pd.DataFrame]:
    """Return the tables of the traced runs.

    Returns:
        ``kernels`` (one row per run, phase and op kind) and ``traces`` (one row per run), by name.
    """
    tabulated = [(one, list(_kernel_rows(one))) for one in _find_traced(collected)]
    return {
        "kernels": make_frame("kernels", (row for _, rows in tabulated for row in rows)),
        "traces": make_frame("traces", (_trace_row(one, rows) for one, rows in tabulated)),
    }


def _find_traced(collected: Collected) -> Iterator[_Traced]:
    recorded = {
        run.id: result.io.by_phase_and_op_kind
        for instrument in reversed(RECORDERS)  # the preferred one comes last and wins
        for run, result in collected.found
        if run.instrument == instrument and result.io
    }
    for run, result in collected.found:
        if result.kernels is not None:
            ceilings = find_ceilings(collected.ceilings, result.device)
            yield _Traced(
                run,
                result,
                result.kernels,
                {(one.phase, one.op_kind): one for one in recorded.get(run.id, [])},
                find_roof(result, ceilings),
                None if ceilings is None else ceilings.launch_latency_s,
            )


def find_roof(result: Result, ceilings: Ceilings | None) -> Roof:
    """Return the device's measured ceilings for the experiment's dtype."""
    if ceilings is None:
        return Roof(None, None, None)
    products, copies = ceilings.matmul.get(result.experiment.dtype), ceilings.bandwidth
    return Roof(
        None if products is None else products.flops_per_s,
        None if copies is None else copies.bytes_per_s,
        device_name(ceilings.device),
    )


def _common(one: _Traced) -> dict[str, Any]:
    return key_of(one.run) | axes_of(one.result.experiment) | pick("kernels", one.result.model)


def _kernel_rows(one: _Traced) -> Iterator[dict[str, Any]]:
    for launched in one.kernels.by_phase_and_op_kind:
        work = one.work.get((launched.phase, launched.op_kind))
        yield (
            _common(one)
            | launched.model_dump()
            | {
                "ceiling_flops_per_s": one.roof.flops_per_s,
                "ceiling_bytes_per_s": one.roof.bytes_per_s,
                "ceilings_of": one.roof.device,
            }
            | ({} if work is None else _compare(work, launched.seconds, one.roof))
        )


def _compare(work: Work, seconds: float, roof: Roof) -> dict[str, Any]:
    moved = work.read + work.written
    return {
        "flops": work.flops,
        "read_bytes": work.read,
        "written_bytes": work.written,
        "arithmetic_intensity": work.flops / moved if moved else None,
        "flops_per_s": work.flops / seconds if seconds else None,
        "bytes_per_s": moved / seconds if seconds else None,
        "bound": find_bound(work, roof),
    }


def find_bound(work: Work, roof: Roof) -> str | None:
    """Return what binds the work: ``compute`` or ``memory``; None where a ceiling is unknown."""
    if roof.flops_per_s is None or roof.bytes_per_s is None:
        return None
    computing_s = work.flops / roof.flops_per_s
    moving_s = (work.read + work.written) / roof.bytes_per_s
    return "compute" if computing_s >= moving_s else "memory"


def _trace_row(one: _Traced, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    bound_s: dict[str, float] = defaultdict(float)
    for row in rows:
        bound_s[row.get("bound") or "unknown"] += row["seconds"]
    return (
        _common(one)
        | pick("traces", one.kernels)
        | {f"{bound}_bound_s": bound_s[bound] for bound in ("compute", "memory")}
        | {
            "unknown_s": bound_s["unknown"],
            "host_to_device_bytes": _bytes_of(one, "HtoD"),
            "device_to_host_bytes": _bytes_of(one, "DtoH"),
            "launch_latency_s": one.launch_latency_s,
        }
    )


def _bytes_of(one: _Traced, direction: str) -> float | None:
    """Return the bytes copied in a direction; None on a CPU, which has no device to copy to."""
    if one.result.device.get("type") == "cpu":
        return None
    copied = one.kernels.copies.get(direction)
    return copied.bytes if copied else 0.0
