"""What the HTML report shows: experiments, peaks, kernels, failures, and single runs."""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import read_run
from dpprof.experiments.records.terms import COMPONENTS, OUTCOMES
from dpprof.results.analysis.difference.waterfall import Holding, list_holdings
from dpprof.results.analysis.groups import RECORDERS
from dpprof.results.analysis.selection import Tables, find_options, spread_owners
from dpprof.results.analysis.tables.axes import (
    BASELINE,
    RUN_KEY,
    count_tokens,
    name_model,
    name_size,
)
from dpprof.results.analysis.tables.frames import naming_axes
from dpprof.results.figures import style
from dpprof.results.report.wording import name_gpus, name_trainings

_DIGITS = 9  # significant digits of a number on the page; whole numbers are exact

_COSTS = [
    *("dp_flop_multiplier", "executed_flops", "arithmetic_intensity", "mfu", "hfu"),
    *("predicted_step_s", "predicted_step_low_s", "predicted_step_high_s"),
]
_KERNEL = [
    *("experiment_id", "phase", "op_kind", "seconds", "flops", "arithmetic_intensity"),
    *("flops_per_s", "bound", "ceiling_flops_per_s", "ceiling_bytes_per_s"),
]
_FAILED = [
    *(*RUN_KEY, "method", "outcome", "attempts"),
    *("error_kind", "error_phase", "error_message", "error_requested_bytes", "error_log"),
]
_PRICED = (
    *("safe_batch_size", "smallest_batch_size", "sample_s", "update_s", "tokens_per_s"),
    *("tokens_per_s_low", "tokens_per_s_high", "gpu_hours", "price", "verdict", "verified"),
    *("over_first", "over_first_low", "over_first_high"),
)

Run = tuple[str, str, int]  # a run, as (experiment id, instrument, replicate)
Rows = list[dict[str, Any]]  # rows with the columns of ``Holding``
JOINED = "smaller holdings"  # the layer and operator of holdings that a thinned page joins
LINES = 20  # how many lines of a log are quoted

_LOG_BYTES = 4096


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
    axes = naming_axes(experiments, but=("model", "method", "batch_size", "seq_len"))
    settings = [_name_setting(row, axes) for _, row in experiments.iterrows()]
    costs = tables["costs"].groupby("experiment_id")[_COSTS].first()
    named = experiments.assign(setting=settings).loc[order]
    return named.merge(costs, how="left", left_on="experiment_id", right_index=True)


def _name_setting(row: Any, axes: list[str]) -> str:
    rest = [
        str(row[axis]) if axis == "dtype" else f"{axis} {row[axis]}"
        for axis in axes
        if axis not in {"target", "device"} and pd.notna(row[axis])
    ]
    where = [] if pd.isna(row["target"]) else [f"on {row['target']}"]
    parts = [name_model(row), name_size(row), f"B = {row['batch_size']:,}"]
    return ", ".join([*parts, *rest, *where])


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


def list_peaks(tables: Tables, experiments: pd.DataFrame) -> pd.DataFrame:
    """Return the first recorded and the first estimated run of each experiment, with owners.

    They come in the order of the experiments, each recorded one before the estimate.
    """
    order = itertools.product(experiments["experiment_id"], RECORDERS)
    run = ["experiment_id", "instrument"]
    first = tables["peaks"].drop_duplicates(run).set_index(run, drop=False)
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
    return kernels[_KERNEL], traces[["experiment_id", "step_s", "idle_s"]]


def list_failures(tables: Tables) -> pd.DataFrame:
    """Return the runs that did not end ok, then those without a result, each with the reason."""
    failed = tables["runs"].loc[lambda runs: runs["outcome"] != "ok", _FAILED]
    absent = tables["missing"].rename(columns={"reason": "error_message"})
    both = failed.astype(object), absent.assign(outcome="missing").astype(object)
    return pd.concat(both, ignore_index=True)


def tell_style(tables: Tables) -> dict[str, Any]:
    """Return colours by name, the same as in figures, in the order in which parts are stacked."""
    methods = style.sort_methods(tables["experiments"]["method"])
    return {
        "baseline": BASELINE,
        "methods": {name: style.method_style(name)["color"] for name in methods},
        "components": style.COMPONENT_COLOURS,
        "op_kinds": style.OP_KIND_COLOURS,
        "phases": style.PHASE_COLOURS,
        "outcomes": {name: style.OUTCOME_COLOURS[name] for name in OUTCOMES}
        | {"missing": "#F2F2F2"},
    }


def pack_timelines(timeline: pd.DataFrame, runs: Iterable[Run], parts: int | None) -> list[Any]:
    """Return the timelines of runs, in their order; None for a run without one."""
    steps = dict(iter(timeline.groupby(RUN_KEY, sort=False)))
    return [_pack_step(steps[run], parts) if run in steps else None for run in runs]


def _pack_step(step: pd.DataFrame, parts: int | None) -> dict[str, Any]:
    components = [name for name in COMPONENTS if step[name].any()]
    totals = step[components].to_numpy(np.int64).sum(axis=1)
    kept = step.iloc[thin(totals, step["phase"].tolist(), parts)]
    timed = not kept["elapsed_s"].isna().any()
    return {
        "ops": kept["ops"].tolist(),
        "elapsed_s": [plain(value) for value in kept["elapsed_s"]] if timed else None,
        "phase": kept["phase"].tolist(),
        "op": [plain(value) for value in kept["op"]],
        "components": {name: kept[name].tolist() for name in components},
    }


def thin(totals: npt.NDArray[np.int64], phases: list[str], parts: int | None) -> list[int]:
    """Return the instants of a timeline to keep: in each of equal parts the highest.

    The first and last of the step and of each phase stay too. The peak is always kept.
    """
    count = len(totals)
    if parts is None or count <= parts:
        return list(range(count))
    highest = (part[totals[part].argmax()] for part in np.array_split(np.arange(count), parts))
    kept = {int(row) for row in highest} | {0, count - 1}
    for row in range(1, count):
        if phases[row] != phases[row - 1]:
            kept |= {row - 1, row}
    return sorted(kept)


def read_holdings(root: Path, run: Run) -> Rows:
    """Return every byte of the peak of a run as rows, the largest first.

    A run whose result does not tell, or cannot be read, has no rows: the tables know its
    components. ``root`` is the folder that holds ``results``.
    """
    experiment_id, instrument, replicate = run
    try:
        held = list_holdings(read_run(root, instrument, experiment_id, replicate))
    except (InputError, ResultError, OSError):
        return []
    return [{**row} for row in held]


def join_small(rows: Rows, most: int | None) -> Rows:
    """Return the largest rows, and of each component what the others sum to as one row.

    The bytes of each component stay the same.
    """
    if most is None or len(rows) <= most:
        return rows
    ordered = sorted(rows, key=lambda row: int(row["bytes"]), reverse=True)
    joined: dict[str, dict[str, Any]] = {}
    for row in ordered[most:]:
        empty = row | {"layer": JOINED, "op": JOINED, "phase": None, "bytes": 0, "storages": 0}
        into = joined.setdefault(row["component"], empty)
        into["bytes"] += row["bytes"]
        into["storages"] += row["storages"]
    return [*ordered[:most], *joined.values()]


def pack_holdings(holdings: Sequence[Rows], most: int | None) -> dict[str, Any]:
    """Return the holdings of runs as columns; ``starts`` says where the rows of each run begin."""
    shortened = [join_small(rows, most) for rows in holdings]
    rows = list(itertools.chain.from_iterable(shortened))
    return {
        "starts": [0, *itertools.accumulate(map(len, shortened))],
        "columns": {name: [row[name] for row in rows] for name in Holding.__annotations__},
    }


def read_end(log: Path, folder: Path) -> str | None:
    """Return the last lines of a log; None if it cannot be read.

    A log that lies outside of ``folder``, by links or by ``..``, is not read: its path comes from
    a result file.
    """
    try:
        if not log.resolve().is_relative_to(folder.resolve()) or not log.is_file():
            return None
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
    return "\n".join(text.splitlines()[-LINES:])
