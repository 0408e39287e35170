"""What the HTML report shows, from the tables: experiments, peaks, kernels, failures."""

import itertools
import math
from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import COMPONENTS, OUTCOMES
from dpprof.results.analysis.groups import RECORDERS
from dpprof.results.analysis.selection import Tables, find_options, spread_owners
from dpprof.results.analysis.tables.axes import (
    AXES,
    BASELINE,
    RUN_KEY,
    count_tokens,
    name_model,
    name_size,
)
from dpprof.results.analysis.tables.frames import naming_axes
from dpprof.results.figures.style import (
    COMPONENT_COLOURS,
    OP_KIND_COLOURS,
    OUTCOME_COLOURS,
    PHASE_COLOURS,
    method_style,
    sort_methods,
)
from dpprof.results.report.wording import name_gpus, name_trainings

_DIGITS = 9
"""Significant digits of a number on the page; whole numbers are exact."""

_NAMED = ("model", "method", "batch_size", "seq_len")
_COSTS = [
    "dp_flop_multiplier",
    "executed_flops",
    "arithmetic_intensity",
    "mfu",
    "hfu",
    "predicted_step_s",
    "predicted_step_low_s",
    "predicted_step_high_s",
]
_KERNEL = (
    "phase",
    "op_kind",
    "seconds",
    "flops",
    "arithmetic_intensity",
    "flops_per_s",
    "bound",
    "ceiling_flops_per_s",
    "ceiling_bytes_per_s",
)
_TRACE = ("step_s", "idle_s")
_FAILED = (
    "outcome",
    "attempts",
    "error_kind",
    "error_phase",
    "error_message",
    "error_requested_bytes",
    "error_log",
)


def pack_frame(frame: pd.DataFrame) -> dict[str, Any]:
    """Return a frame as ``{"rows": count, "columns": {name: list}}``, which JSON can hold."""
    columns = {str(name): [plain(cell) for cell in frame[name].tolist()] for name in frame}
    return {"rows": len(frame), "columns": columns}


def plain(value: Any) -> Any:
    """Return a table's cell as JSON has it: unknown and infinite as None, 3.0 as 3."""
    if value is None or isinstance(value, str | bool):
        return value
    if pd.isna(value) or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.{_DIGITS}g}")


def list_experiments(tables: Tables) -> pd.DataFrame:
    """Return the experiments with the setting of each in words, and the costs of a step.

    The setting says what tells experiments apart besides the method. Experiments of the largest
    model and batch come first.
    """
    experiments = tables["experiments"]
    size = experiments[["parameters_total", "batch_size", "seq_len"]].astype(float).prod(axis=1)
    order = size.sort_values(ascending=False, kind="stable").index
    axes = naming_axes(experiments, but=_NAMED)
    settings = [_name_setting(row, axes) for _, row in experiments.iterrows()]
    costs = tables["costs"].groupby("experiment_id")[_COSTS].first()
    named = experiments.assign(setting=settings).loc[order]
    return named.merge(costs, how="left", left_on="experiment_id", right_index=True)


def _name_setting(row: Any, axes: list[str]) -> str:
    rest = [
        str(row[axis]) if axis in {"dtype", "device"} else f"{axis} {row[axis]}"
        for axis in axes
        if axis not in {"target", "device"} and pd.notna(row[axis])
    ]
    where = [] if pd.isna(row["target"]) else [f"on {row['target']}"]
    parts = [name_model(row), name_size(row), f"B = {row['batch_size']:,}"]
    return ", ".join([*parts, *rest, *where])


_SETTING = {name for name in AXES if name != "method"}
_PRICED = (
    *("safe_batch_size", "smallest_batch_size", "sample_s", "update_s", "tokens_per_s"),
    *("tokens_per_s_low", "tokens_per_s_high", "gpu_hours", "price", "verdict", "verified"),
)


def list_trainings(tables: Tables) -> pd.DataFrame:
    """Return what capacities and the privacy budget say of each option of each training."""
    trainings = find_options(tables)
    if not trainings:
        return pd.DataFrame(columns=["training", "gpus", "method", *_PRICED])
    names = zip(trainings, name_trainings(trainings, "seq_len", "dtype"), strict=True)
    rows = pd.concat([options.assign(training=name) for options, name in names], ignore_index=True)
    one_sample = rows.assign(batch_size=1, parallel=None)
    return rows[["training", "method", "private", "ranks", *_PRICED]].assign(
        gpus=[name_gpus(row) for _, row in rows.iterrows()],
        tokens_per_sample=one_sample.apply(count_tokens, axis=1),
    )


def list_axes(experiments: pd.DataFrame) -> list[str]:
    """Return the columns that say what an experiment is, besides its method."""
    return [name for name in experiments if name in _SETTING]


def list_peaks(tables: Tables, experiments: pd.DataFrame) -> pd.DataFrame:
    """Return the first recorded and the first estimated run of each experiment, with owners.

    They come in the order of the experiments, each recorded one before the estimate.
    """
    peaks = tables["peaks"]
    order = itertools.product(experiments["experiment_id"], RECORDERS)
    run = ["experiment_id", "instrument"]
    first = peaks.drop_duplicates(run).set_index(run, drop=False)
    first = first.loc[[key for key in order if key in first.index]].reset_index(drop=True)
    by_owner = spread_owners(tables["owners"])
    held = [name for name in COMPONENTS if (by_owner[name] > 0).any()]
    return first.merge(
        by_owner[held], left_on=RUN_KEY, right_index=True, suffixes=("", "_component")
    )


def list_kernels(tables: Tables) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return kernels by phase and op kind, and traces, of the first traced run of experiments."""
    traces = tables["traces"].sort_values(RUN_KEY).drop_duplicates("experiment_id")
    kernels = tables["kernels"].merge(traces[RUN_KEY], on=RUN_KEY)
    return (
        kernels[["experiment_id", *_KERNEL]],
        traces[["experiment_id", *_TRACE]],
    )


def list_failures(tables: Tables) -> pd.DataFrame:
    """Return the runs that did not end ok, then those without a result, each with the reason."""
    runs, missing = tables["runs"], tables["missing"]
    failed = runs.loc[runs["outcome"] != "ok", [*RUN_KEY, "method", *_FAILED]]
    absent = missing.rename(columns={"reason": "error_message"}).assign(outcome="missing")
    return pd.concat([failed.astype(object), absent.astype(object)], ignore_index=True)


def tell_style(tables: Tables) -> dict[str, Any]:
    """Return colours by name, the same as in figures, in the order in which parts are stacked."""
    methods = sort_methods(tables["experiments"]["method"])
    return {
        "baseline": BASELINE,
        "methods": {name: method_style(name)["color"] for name in methods},
        "components": COMPONENT_COLOURS,
        "op_kinds": OP_KIND_COLOURS,
        "phases": PHASE_COLOURS,
        "outcomes": {name: OUTCOME_COLOURS[name] for name in OUTCOMES} | {"missing": "#F2F2F2"},
    }
