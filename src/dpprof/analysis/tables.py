"""Tidy tables: one row per run, step, snapshot and experiment; bytes and seconds throughout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from dpprof.analysis.collection import Collected
from dpprof.experiment import Experiment
from dpprof.planning import PlannedRun
from dpprof.result import OUTCOMES, Result
from dpprof.storage import canonical_json

BASELINE = "standard"
_NOT_IN_BASELINE = {"method", "max_grad_norm", "noise_multiplier"}
"""What the non-private step does not depend on."""


def build_tables(collected: Collected) -> dict[str, pd.DataFrame]:
    """Build every table, by file stem.

    Returns:
        ``runs`` (one row per experiment, instrument and replicate), ``experiments`` (one
        row per experiment, over its replicates), ``outcomes`` (one row per method),
        ``steps`` (one row per step, warm-up included), ``snapshots`` (one row per named
        snapshot) and ``missing`` (one row per run without a result).
    """
    runs = _frame(
        (_run_row(run, result, collected) for run, result in collected.found), _RUN_COLUMNS
    )
    return {
        "runs": runs,
        "experiments": _experiments(collected),
        "outcomes": _outcomes(collected),
        "steps": _frame(_step_rows(collected), [*_RUN_KEY, "stage", "index", "step_s"]),
        "snapshots": _frame(
            _snapshot_rows(collected),
            [*_RUN_KEY, "name", "elapsed_s", "allocated_bytes", "reserved_bytes", "rss_bytes"],
        ),
        "missing": _frame(
            (_key(run) | {"method": run.method} for run in collected.missing),
            [*_RUN_KEY, "method"],
        ),
    }


_RUN_KEY = ["experiment_id", "instrument", "replicate"]
AXES = [name for name in Experiment.model_fields if name != "timeout_s"]
"""What tells experiments apart in a table; a time limit does not."""

_MEMORY = [
    "peak_allocated_bytes",
    "first_step_peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_rss_bytes",
    "peak_device_used_bytes",
    "alloc_retries",
]
_RUN_COLUMNS = [
    *_RUN_KEY,
    "sweeps",
    *AXES,
    "outcome",
    "attempts",
    "error_kind",
    "error_phase",
    "error_message",
    "error_requested_bytes",
    "error_log",
    "parameters_total",
    "median_step_s",
    "tokens_per_s",
    "samples_per_s",
    "steps_per_s",
    *_MEMORY,
    "started_at",
    "wall_s",
    "device_name",
    "hostname",
    "python",
    "torch",
    "opacus",
    "git_commit",
    "git_dirty",
    "code_digest",
    "code_is_current",
]


_TEXTS = {
    *("experiment_id", "instrument", "sweeps", "model", "method", "dtype", "optimizer"),
    *("attention", "device", "outcome", "error_kind", "error_phase", "error_message"),
    *("error_log", "started_at", "device_name", "hostname", "python", "torch", "opacus"),
    *("git_commit", "code_digest", "peak_kind", "stage", "name"),
}


def read_table(path: Path) -> pd.DataFrame:
    """Read a table back as it was written: a text like ``null`` or ``12`` stays a text."""
    columns = pd.read_csv(path, nrows=0).columns
    texts = dict.fromkeys(_TEXTS.intersection(columns), str)
    return pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=[""])


def varying_axes(experiments: pd.DataFrame, but: Iterable[str]) -> list[str]:
    """List the axes, but for some, in which the experiments of a table differ."""
    return [
        name for name in AXES if name not in set(but) and len(set(experiments[name].map(str))) > 1
    ]


def _frame(rows: Iterable[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Make a frame whose columns exist even where there are no rows."""
    return pd.DataFrame(list(rows), columns=pd.Index(columns))


def _key(run: PlannedRun) -> dict[str, Any]:
    return {"experiment_id": run.id, "instrument": run.instrument, "replicate": run.replicate}


def _model_text(experiment: Experiment) -> str:
    """Name the model; a mapping of dimensions is spelled out, ``V1000-d64-L2-H4``."""
    model = experiment.model
    if isinstance(model, str):
        return model
    return f"V{model.vocab_size}-d{model.d_model}-L{model.layers}-H{model.heads}"


def _axes(experiment: Experiment) -> dict[str, Any]:
    fields = experiment.model_dump(mode="json")
    return {name: fields[name] for name in AXES} | {"model": _model_text(experiment)}


def _run_row(run: PlannedRun, result: Result, collected: Collected) -> dict[str, Any]:
    error, time, memory = result.error, result.time, result.memory
    provenance = result.provenance
    row = _key(run) | {"sweeps": " ".join(run.sweeps)} | _axes(result.experiment)
    row |= {
        "outcome": result.outcome,
        "attempts": len(result.attempts),
        "error_kind": error and error.kind,
        "error_phase": error and error.phase,
        "error_message": error and error.message,
        "error_requested_bytes": error and error.requested_bytes,
        "error_log": error and error.log,
        "parameters_total": result.model and result.model.parameters_total,
        "median_step_s": time and time.median_s,
        "started_at": result.started_at,
        "wall_s": result.wall_s,
        "device_name": result.device.get("name"),
        "hostname": provenance["host"]["hostname"],
        "python": provenance["python"],
        "torch": provenance["packages"]["torch"],
        "opacus": provenance["packages"]["opacus"],
        "git_commit": provenance["git"]["commit"],
        "git_dirty": provenance["git"]["dirty"],
        "code_digest": result.code_digest,
        "code_is_current": tuple(_key(run).values()) not in collected.outdated,
    }
    if result.throughput is not None:
        row |= result.throughput.model_dump()
    if memory is not None:
        row |= memory.model_dump(include=set(_MEMORY))
    return row


def _step_rows(collected: Collected) -> Iterable[dict[str, Any]]:
    for run, result in collected.found:
        if result.time is not None:
            stages = {"warmup": result.time.warmup_step_s, "timed": result.time.step_s}
            for stage, samples in stages.items():
                for index, step_s in enumerate(samples):
                    yield _key(run) | {"stage": stage, "index": index, "step_s": step_s}


def _snapshot_rows(collected: Collected) -> Iterable[dict[str, Any]]:
    for run, result in collected.found:
        for snapshot in result.memory.snapshots if result.memory else []:
            yield _key(run) | snapshot.model_dump(exclude={"components"})


def _baseline_key(experiment: Experiment) -> str:
    """Spell what an experiment must share with its non-private baseline."""
    return canonical_json(experiment.model_dump(mode="json", exclude=_NOT_IN_BASELINE))


def _experiments(collected: Collected) -> pd.DataFrame:
    """Reduce clean runs over their replicates: medians over processes, never over steps."""
    groups: dict[str, list[Result]] = {}
    planned: dict[str, int] = {}
    for run in [*(run for run, _ in collected.found), *collected.missing]:
        if run.instrument == "clean":
            planned[run.id] = planned.get(run.id, 0) + 1
    for run, result in collected.found:
        if run.instrument == "clean":
            groups.setdefault(run.id, []).append(result)
    rows = {name: _experiment_row(results, planned[name]) for name, results in groups.items()}
    baselines: dict[str, list[Result]] = {}
    for results in groups.values():
        if results[0].experiment.method == BASELINE:
            baselines.setdefault(_baseline_key(results[0].experiment), []).extend(results)
    for name, results in groups.items():
        row, alike = rows[name], baselines.get(_baseline_key(results[0].experiment), [])
        base = _experiment_row(alike, len(alike)) if alike else {}
        row["step_ratio"] = _ratio(row["median_step_s"], base.get("median_step_s"))
        row["peak_ratio"] = (
            _ratio(row["peak_bytes"], base.get("peak_bytes"))
            if row["peak_kind"] == base.get("peak_kind")
            else None
        )
    return _frame(rows.values(), _EXPERIMENT_COLUMNS)


_EXPERIMENT_COLUMNS = [
    "experiment_id",
    *AXES,
    "parameters_total",
    "replicates",
    "replicates_ok",
    "outcome",
    "median_step_s",
    "min_step_s",
    "max_step_s",
    "tokens_per_s",
    "peak_kind",
    "peak_bytes",
    "peak_min_bytes",
    "peak_max_bytes",
    "step_ratio",
    "peak_ratio",
]


def _experiment_row(results: list[Result], planned: int) -> dict[str, Any]:
    experiment = results[0].experiment
    good = [result for result in results if result.outcome == "ok"]
    steps = pd.Series([r.time.median_s for r in good if r.time], dtype=float)
    kind, peaks = _peaks(good)
    step_s = _or_none(steps.median())
    return (
        {"experiment_id": experiment.id}
        | _axes(experiment)
        | {
            "parameters_total": next((r.model.parameters_total for r in good if r.model), None),
            "replicates": planned,
            "replicates_ok": len(good),
            "outcome": " ".join(name for name in OUTCOMES if name in {r.outcome for r in results}),
            "median_step_s": step_s,
            "min_step_s": _or_none(steps.min()),
            "max_step_s": _or_none(steps.max()),
            "tokens_per_s": step_s and experiment.batch_size * experiment.seq_len / step_s,
            "peak_kind": kind,
            "peak_bytes": _or_none(peaks.median()),
            "peak_min_bytes": _or_none(peaks.min()),
            "peak_max_bytes": _or_none(peaks.max()),
        }
    )


def _peaks(results: list[Result]) -> tuple[str | None, "pd.Series[float]"]:
    """Take the allocator's peaks where there are any, resident memory where not."""
    memories = [result.memory for result in results if result.memory]
    for kind, figure in (("allocated", "peak_allocated_bytes"), ("rss", "peak_rss_bytes")):
        peaks = [getattr(memory, figure) for memory in memories]
        if peaks and None not in peaks:
            return kind, pd.Series(peaks, dtype=float)
    return None, pd.Series(dtype=float)


def _or_none(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _outcomes(collected: Collected) -> pd.DataFrame:
    """Count outcomes per method; the success rate is over the runs that have a result."""
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
