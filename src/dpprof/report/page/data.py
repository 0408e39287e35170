"""What the HTML report shows, from the tables: experiments, peaks, kernels, failures."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.selection import RECORDERS
from dpprof.analysis.tables.axes import BASELINE, RUN_KEY, name_model
from dpprof.analysis.tables.frames import naming_axes
from dpprof.figures.style import (
    COMPONENT_COLOURS,
    OP_KIND_COLOURS,
    OUTCOME_COLOURS,
    PHASE_COLOURS,
    method_style,
    sort_methods,
)
from dpprof.records.terms import COMPONENTS, OUTCOMES

Tables = Mapping[str, pd.DataFrame]

_NAMED = ("model", "method", "batch_size", "seq_len")
_EXPERIMENT = (
    "experiment_id",
    "setting",
    "method",
    "model",
    "seq_len",
    "batch_size",
    "target",
    "dtype",
    "device",
    "parameters_total",
    "outcome",
    "processes",
    "median_step_s",
    "step_low_s",
    "step_high_s",
    "step_ratio",
    "step_ratio_low",
    "step_ratio_high",
    "step_verdict",
    "tokens_per_s",
    "peak_kind",
    "peak_bytes",
    "peak_ratio",
    "mechanism",
    "verified",
)
_PEAK = (
    "peak_bytes",
    "phase",
    "module",
    "op",
    "unattributed_bytes",
    "rounding_bytes",
    "reserved_bytes",
    "target_memory_bytes",
    "fits",
    "allocator_peak_bytes",
    "gap_bytes",
    "bound_bytes",
    "valid",
    "reason",
)
_KERNEL = (
    "phase",
    "op_kind",
    "seconds",
    "launches",
    "flops",
    "arithmetic_intensity",
    "flops_per_s",
    "bytes_per_s",
    "bound",
    "ceiling_flops_per_s",
    "ceiling_bytes_per_s",
)
_TRACE = ("step_s", "total_s", "idle_s", "steps")
_FAILED = (
    "outcome",
    "attempts",
    "error_kind",
    "error_phase",
    "error_message",
    "error_requested_bytes",
    "error_log",
)


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
    named = experiments.assign(setting=settings).loc[order, list(_EXPERIMENT)]
    costs = tables["costs"].drop_duplicates("experiment_id").set_index("experiment_id")
    for name in ("dp_flop_multiplier", "executed_flops", "arithmetic_intensity", "mfu", "hfu"):
        named[name] = named["experiment_id"].map(costs[name])
    predicted = tables["costs"].dropna(subset=["predicted_step_s"]).drop_duplicates("experiment_id")
    for name in ("predicted_step_s", "predicted_step_low_s", "predicted_step_high_s"):
        named[name] = named["experiment_id"].map(predicted.set_index("experiment_id")[name])
    return named.reset_index(drop=True)


def _name_setting(row: Any, axes: list[str]) -> str:
    rest = [
        str(row[axis]) if axis in {"dtype", "device"} else f"{axis} {row[axis]}"
        for axis in axes
        if axis not in {"target", "device"} and pd.notna(row[axis])
    ]
    where = [] if pd.isna(row["target"]) else [f"on {row['target']}"]
    parts = [name_model(row), f"T = {row['seq_len']:,}", f"B = {row['batch_size']:,}"]
    return ", ".join([*parts, *rest, *where])


def list_peaks(tables: Tables, experiments: pd.DataFrame) -> pd.DataFrame:
    """Return the first recorded and the first estimated run of each experiment, with owners.

    They come in the order of the experiments, each recorded one before the estimate.
    """
    peaks = tables["peaks"]
    place = {name: at for at, name in enumerate(experiments["experiment_id"])}
    rank = {name: at for at, name in enumerate(RECORDERS)}
    ordered = (
        peaks[peaks["instrument"].isin(RECORDERS)]
        .assign(_place=lambda rows: rows["experiment_id"].map(place))
        .assign(_rank=lambda rows: rows["instrument"].map(rank))
        .sort_values(["_place", "_rank"], kind="stable")
    )
    first = ordered.drop_duplicates(["experiment_id", "instrument"])
    owners = tables["owners"].set_index([*RUN_KEY, "component"])["bytes"].unstack()  # noqa: PD010
    by_owner = owners.reindex(columns=pd.Index(COMPONENTS)).fillna(0)
    held = [name for name in COMPONENTS if (by_owner[name] > 0).any()]
    return first[[*RUN_KEY, *_PEAK]].merge(
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
