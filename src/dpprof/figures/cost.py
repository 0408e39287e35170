"""What does a token cost as sequences grow longer?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.analysis.selection import choose_runs
from dpprof.analysis.tables.axes import count_tokens
from dpprof.figures.panels import Panel, split
from dpprof.figures.scaling import dress, mark_some, name_lines
from dpprof.figures.style import NothingToDrawError, method_style, new_figure

_ROWS = 4
_ALONG = "seq_len"
_COSTS = {
    "executed_flops": (1e6, "MFLOP per token"),
    "bytes_moved": (2**20, "MiB moved per token"),
    "step_s": (1e-6, "time per token (µs)"),
}


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """FLOPs, bytes moved and time per token over the sequence length, all else equal.

    FLOPs count matrix products and attention. Bytes are what operators must read and write. Time
    is measured by the instrument clean. Dashed lines are lower bounds from a target's data sheet,
    where nothing ran.
    """
    parameters = tables["experiments"][["experiment_id", "parameters_total"]]
    known = _per_token(choose_runs(tables["costs"]).merge(parameters, on="experiment_id"))
    here = known["target"].isna()
    panels = [*_find_panels(known[here]), *_find_panels(known[~here])][:_ROWS]
    if not panels:
        raise NothingToDrawError(f"no two experiments with counted FLOPs differ only in {_ALONG}")
    figure, axes = new_figure(len(_COSTS), len(panels), row_inches=2.2)
    for row, panel in zip(axes, panels, strict=True):
        for axis, (cost, (unit, label)) in zip(row, _COSTS.items(), strict=True):
            for method, points in panel.rows.groupby("method"):
                _draw_method(axis, str(method), points.sort_values(_ALONG), cost, unit)
            dress(axis, panel, _ALONG, label)
            axis.set_title("")
        row[0].set_title(panel.title, loc="left")
    name_lines(figure, axes)
    return figure


def _find_panels(rows: pd.DataFrame) -> list[Panel]:
    """Return panels of experiments that differ only in method and sequence length."""
    if rows.empty:
        return []
    every = split(rows, "", but=[_ALONG], most=len(rows)).shown
    grown = [
        panel.rows[panel.rows.groupby("method")[_ALONG].transform("nunique") > 1] for panel in every
    ]
    grown = [rows for rows in grown if len(rows)]
    return split(pd.concat(grown), "", but=[_ALONG], most=_ROWS).shown if grown else []


def _per_token(rows: pd.DataFrame) -> pd.DataFrame:
    tokens = rows.apply(count_tokens, axis=1)
    least = rows["roofline_step_s"].where(rows["target"].notna())
    return rows.assign(
        executed_flops=rows["executed_flops"] / tokens,
        bytes_moved=(rows["bytes_read"] + rows["bytes_written"]) / tokens,
        step_s=rows["median_step_s"].astype(float).fillna(least.astype(float)) / tokens,
        bare=rows["median_step_s"].isna(),
    )


def _draw_method(axis: Axes, method: str, points: pd.DataFrame, cost: str, unit: float) -> None:
    known = points.dropna(subset=[cost])
    dashed = cost == "step_s" and known["bare"].any()
    axis.plot(
        known[_ALONG],
        known[cost] / unit,
        linewidth=1,
        markersize=4,
        linestyle="--" if dashed else "-",
        label=method,
        markevery=mark_some(known[_ALONG].to_numpy(float)),
        **method_style(method),
    )
