"""Tidy tables: one row per run, step, phase, snapshot ...; all in bytes and seconds."""

from collections.abc import Iterable
from statistics import median
from typing import Any

import pandas as pd

from dpprof.analysis.advice import tabulate_advice
from dpprof.analysis.axes import axes_of, key_of
from dpprof.analysis.budget import Planned, tabulate_budget, tabulate_noise
from dpprof.analysis.ceilings_table import tabulate_ceilings
from dpprof.analysis.collection import Collected
from dpprof.analysis.experiments_table import tabulate_experiments
from dpprof.analysis.findings import find
from dpprof.analysis.frames import make_frame
from dpprof.analysis.groups import Noise, group_runs
from dpprof.analysis.instrument_overhead import tabulate_instrument_overhead
from dpprof.analysis.kernel_tables import tabulate_kernels
from dpprof.analysis.memory_tables import tabulate_memory
from dpprof.analysis.methods_table import tabulate_methods
from dpprof.analysis.rank_tables import list_exchanges, list_ranks
from dpprof.analysis.settings_table import tabulate_settings
from dpprof.analysis.standings import tabulate_verification
from dpprof.analysis.table_columns import TABLES
from dpprof.analysis.timeline_table import list_instants
from dpprof.planning.planner import PlannedRun
from dpprof.records.result import Result
from dpprof.records.step_costs import Memory
from dpprof.records.terms import OUTCOMES

Rows = Iterable[dict[str, Any]]


def build_tables(collected: Collected, planned: Planned | None = None) -> dict[str, pd.DataFrame]:
    """Return every table, by file stem; ``TABLES`` declares them.

    The table ``timeline`` is empty where timelines were told while results were collected.

    ``planned`` is the config's privacy budget, with the noise that it asks for.
    """
    groups = group_runs(collected)
    noise = Noise(groups)
    experiments = tabulate_experiments(groups, noise, collected.standings)
    recorded, kernels = tabulate_memory(collected, groups), tabulate_kernels(collected)
    rows: dict[str, Rows] = {
        "runs": (_run_row(run, result, collected) for run, result in collected.found),
        "steps": _step_rows(collected),
        "phases": _phase_rows(collected),
        "snapshots": _snapshot_rows(collected),
        "components": _component_rows(collected),
        "samplers": _sampler_rows(collected),
        "ranks": list_ranks(collected),
        "communication": list_exchanges(collected),
        "timeline": (row for found in collected.found for row in list_instants(*found)),
        "missing": (
            key_of(run) | {"method": run.method, "reason": reason}
            for run, reason in collected.missing.items()
        ),
    }
    return {
        **{name: make_frame(name, found) for name, found in rows.items()},
        **recorded,
        **kernels,
        "experiments": experiments,
        "settings": tabulate_settings(groups, noise),
        "methods": tabulate_methods(experiments),
        "outcomes": _outcomes(collected),
        "instrument_overhead": tabulate_instrument_overhead(groups),
        "advice": tabulate_advice(collected),
        "budget": tabulate_budget(collected, planned),
        "noise": tabulate_noise(planned),
        "verification": tabulate_verification(
            (group.experiment for group in groups), collected.standings
        ),
        "ceilings": tabulate_ceilings(collected.ceilings),
        "findings": find(
            collected,
            recorded["peaks"],
            recorded["costs"],
            kernels["kernels"],
            None if planned is None else planned.privacy,
        ),
    }


def _run_row(run: PlannedRun, result: Result, collected: Collected) -> dict[str, Any]:
    error, time, memory = result.error, result.time, result.memory
    provenance = result.provenance
    host, packages, git = (provenance.get(key, {}) for key in ("host", "packages", "git"))
    row = key_of(run) | {"sweeps": " ".join(run.sweeps)} | axes_of(result.experiment)
    row |= {
        "outcome": result.outcome,
        "attempts": len(result.attempts),
        "others_busy_cores": result.attempts[-1].others_busy_cores,
        "error_kind": error and error.kind,
        "error_phase": error and error.phase,
        "error_message": error and error.message,
        "error_requested_bytes": error and error.requested_bytes,
        "error_log": error and error.log,
        "parameters_total": result.model and result.model.parameters_total,
        "median_step_s": time and time.median_s,
        "host_read_bytes": result.host_io and result.host_io.bytes_read,
        "host_written_bytes": result.host_io and result.host_io.bytes_written,
        "joules_per_step": result.energy and result.energy.joules_per_step,
        "started_at": result.started_at,
        "wall_s": result.wall_s,
        "device_name": result.device.get("name"),
        "hostname": host.get("hostname"),
        "python": provenance.get("python"),
        "torch": packages.get("torch"),
        "opacus": packages.get("opacus"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        "code_digest": result.code_digest,
        "code_is_current": tuple(key_of(run).values()) not in collected.outdated,
    }
    if result.throughput is not None:
        row |= result.throughput.model_dump()
    if memory is not None:
        row |= memory.model_dump(include=set(TABLES["runs"].columns)) | {
            "fragmentation": _fragmentation(memory)
        }
    return row


def _fragmentation(memory: Memory) -> float | None:
    """Return the share of the peak reserved memory that the peak allocated memory leaves unused."""
    allocated, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    return 1 - allocated / reserved if allocated is not None and reserved else None


def _step_rows(collected: Collected) -> Rows:
    for run, result in collected.found:
        if result.time is not None:
            stages = {"warmup": result.time.warmup_step_s or [], "timed": result.time.step_s}
            for stage, samples in stages.items():
                for index, step_s in enumerate(samples):
                    yield key_of(run) | {"stage": stage, "index": index, "step_s": step_s}


def _phase_rows(collected: Collected) -> Rows:
    for run, result in collected.found:
        phases_s = (result.time and result.time.phases_s) or {}
        for phase, samples in phases_s.items():
            yield key_of(run) | {
                "phase": phase,
                "median_s": median(samples) if samples else None,
                "min_s": min(samples, default=None),
                "max_s": max(samples, default=None),
            }


def _snapshot_rows(collected: Collected) -> Rows:
    for run, result in collected.found:
        for snapshot in result.memory.snapshots if result.memory else []:
            yield key_of(run) | snapshot.model_dump(exclude={"components"})


def _component_rows(collected: Collected) -> Rows:
    for run, result in collected.found:
        for snapshot in result.memory.snapshots if result.memory else []:
            for component, size in (snapshot.components or {}).items():
                moment = {"snapshot": snapshot.name, "component": component, "bytes": size}
                yield key_of(run) | moment


def _sampler_rows(collected: Collected) -> Rows:
    for run, result in collected.found:
        for layer, path in (result.samplers or {}).items():
            yield key_of(run) | {"method": run.method, "layer": layer, "path": path}


def _outcomes(collected: Collected) -> pd.DataFrame:
    """Return outcome counts per method; the success rate covers the runs that have a result."""
    counts = pd.DataFrame(
        [(run.method, result.outcome) for run, result in collected.found],
        columns=pd.Index(["method", "outcome"]),
    )
    table = pd.crosstab(counts["method"], counts["outcome"])
    table = table.reindex(columns=list(OUTCOMES), fill_value=0)
    for run in collected.missing:
        if run.method not in table.index:
            table.loc[run.method] = 0
    missing = pd.Series([run.method for run in collected.missing], dtype=str).value_counts()
    table.insert(0, "runs", table.sum(axis=1))
    table["missing"] = missing.reindex(table.index, fill_value=0)
    table["success_rate"] = (table["ok"] / table["runs"]).where(table["runs"] > 0)
    table.index.name = "method"
    return table.sort_index().reset_index().rename_axis(columns=None)
