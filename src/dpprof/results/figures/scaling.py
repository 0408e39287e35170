"""How do memory, time and the cost of a token grow with batch size and sequence length?"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.selection import choose_runs
from dpprof.results.analysis.tables.axes import count_tokens
from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.figures.labels import ends_of, label_ends
from dpprof.results.figures.panels import Panel, Panels, break_title, split
from dpprof.results.figures.style import (
    NothingToDrawError,
    method_style,
    new_figure,
    scale_log,
    tell,
)

_LABELS = {"batch_size": "batch size", "seq_len": "sequence length (tokens)"}
_COSTS = {
    "executed_flops": (1e6, "MFLOP per token"),
    "bytes_moved": (2**20, "MiB moved per token"),
    "step_s": (1e-6, "time per token (µs)"),
}
_ROWS = 2
_MAX_TICKS = 6
_MOST_MARKS = 16  # a line of more points shows marks at a few of them
_MARKS = 8


def draw_batch_size(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Peak memory and step time over the batch size, all else equal.

    Points are medians over processes, error bars or bands 95 % intervals.
    """
    return _draw(tables["experiments"], "batch_size")


def draw_seq_len(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Peak memory and step time over the sequence length, all else equal.

    Points are medians over processes, error bars or bands 95 % intervals.
    """
    return _draw(tables["experiments"], "seq_len")


def _draw(experiments: pd.DataFrame, along: str) -> Figure:
    timed = experiments.dropna(subset=["median_step_s", "peak_bytes"])
    panels = _find_panels(timed, along, also=["peak_kind"])
    if not panels.shown:
        raise NothingToDrawError(f"no two successful experiments differ only in {along}")
    figure, axes = new_figure(2, len(panels.shown), row_inches=2.2)
    for (memory, time), panel in zip(axes, panels.shown, strict=True):
        for method, points in panel.rows.groupby("method"):
            _draw_method(memory, time, str(method), points.sort_values(along), along)
        dress(memory, panel, along, "peak (MiB)")
        dress(time, panel, along, "step time (ms)")
    panels.note_hidden_panels(figure)
    _name_lines(figure, axes)
    tell(figure, _say_growth(panels.shown[0].rows, along))
    return figure


def _say_growth(rows: pd.DataFrame, along: str) -> str:
    said = []
    for method, points in rows.sort_values(along).groupby("method"):
        first, last = points.iloc[0], points.iloc[-1]
        if last[along] > first[along]:
            said.append((last["median_step_s"] / first["median_step_s"], str(method), first, last))
    if not said:
        return ""
    ratio, method, first, last = max(said, key=lambda growth: growth[0])
    return (
        f"From {first[along]:,} to {last[along]:,} ({_LABELS[along]}) a step of {method}, which "
        f"grows most, takes {ratio:.1f} times as long."
    )


def draw_cost(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """FLOPs, bytes moved and time per token over the sequence length, all else equal.

    FLOPs count matrix products and attention. Bytes are what operators must read and write. Time
    is measured by the instrument clean. Dashed lines are lower bounds from a target's data sheet,
    where nothing ran.
    """
    along = "seq_len"
    parameters = tables["experiments"][["experiment_id", "parameters_total"]]
    records = choose_runs(tables["costs"]).merge(parameters, on="experiment_id")
    tokens, here = records.apply(count_tokens, axis=1), records["target"].isna()
    step_s = records["median_step_s"].astype(float)
    records = records.assign(
        executed_flops=records["executed_flops"] / tokens,
        bytes_moved=(records["bytes_read"] + records["bytes_written"]) / tokens,
        step_s=step_s.fillna(records["roofline_step_s"].where(~here).astype(float)) / tokens,
        bare=step_s.isna(),
    )
    halves = [_find_panels(rows, along).shown for rows in (records[here], records[~here])]
    panels = [*halves[0], *halves[1]][:_ROWS]
    if not panels:
        raise NothingToDrawError(f"no two experiments with counted FLOPs differ only in {along}")
    drawn = pd.concat(panel.rows for panel in panels)
    places = {name: drawn.dropna(subset=[name]).groupby("method")[along] for name in _COSTS}
    grow = {name for name, place in places.items() if (place.max() > place.min()).any()}
    costs = {name: how for name, how in _COSTS.items() if name in grow}
    figure, axes = new_figure(len(costs), len(panels), row_inches=2.0)
    for row, panel in zip(axes, panels, strict=True):
        for axis, (cost, (unit, label)) in zip(row, costs.items(), strict=True):
            for method, points in panel.rows.groupby("method"):
                _draw_cost(axis, str(method), points.sort_values(along), cost, unit)
            dress(axis, panel, along, label)
            axis.set_title("")
        row[0].set_title(panel.title, loc="left")
    _name_lines(figure, axes)
    dearest = least_of(drawn, "executed_flops", -1)
    flops = f"{dearest['executed_flops'] / 1e6:,.0f} MFLOP per token"
    tell(figure, f"{dearest['method']} computes most: {flops} at {dearest[along]:,} tokens.")
    return figure


def _find_panels(rows: pd.DataFrame, along: str, also: Iterable[str] = ()) -> Panels:
    """Return panels of experiments that differ only in method and along the axis, if there are."""
    if rows.empty:
        return Panels([], 0)
    every = split(rows, "", but=[along], also=also, most=len(rows)).shown
    grown = pd.concat(
        panel.rows[panel.rows.groupby("method")[along].transform("nunique") > 1] for panel in every
    )
    if grown.empty:
        return Panels([], 0)
    return split(grown, "", but=[along], also=also, most=_ROWS)


def _name_lines(figure: Figure, rows: Iterable[Iterable[Axes]]) -> None:
    """Write the methods' names beside their lines: in each row in the last panel that has most."""
    figure.draw_without_rendering()
    for row in rows:
        ends = [(axis, ends_of(axis)) for axis in row]
        label_ends(*max(reversed(ends), key=lambda panel: len(panel[1])))


def _draw_method(memory: Axes, time: Axes, method: str, points: pd.DataFrame, along: str) -> None:
    style: dict[str, Any] = method_style(method) | {"linewidth": 1, "markersize": 4}
    style["markevery"] = mark_some(points[along].to_numpy(float))
    memory.plot(points[along], points["peak_bytes"] / 2**20, label=method, **style)
    step_ms = points["median_step_s"] * 1e3
    low_ms = points["step_low_s"].fillna(points["median_step_s"]) * 1e3
    high_ms = points["step_high_s"].fillna(points["median_step_s"]) * 1e3
    time.plot(points[along], step_ms, label=method, **style)
    if style["markevery"] is not None:
        time.fill_between(points[along], low_ms, high_ms, color=style["color"], alpha=0.3, lw=0)
        return
    bars: dict[str, Any] = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.8}
    reach = [step_ms - low_ms, high_ms - step_ms]
    time.errorbar(points[along], step_ms, yerr=reach, capsize=2, **bars)


def _draw_cost(axis: Axes, method: str, points: pd.DataFrame, cost: str, unit: float) -> None:
    drawn = points.dropna(subset=[cost])
    dashed = cost == "step_s" and drawn["bare"].any()
    axis.plot(
        drawn["seq_len"],
        drawn[cost] / unit,
        linewidth=1,
        markersize=4,
        linestyle="--" if dashed else "-",
        label=method,
        markevery=mark_some(drawn["seq_len"].to_numpy(float)),
        **method_style(method),
    )


def mark_some(along: npt.NDArray[np.float64]) -> list[int] | None:
    """Return the points of a line that get a mark; None for all, as long as they are few.

    Marks of many points would hide each other and the line. Those that are kept are about as far
    from one another on a logarithmic axis. Positions are positive and ascending.
    """
    if len(along) <= _MOST_MARKS:
        return None
    places = np.geomspace(along[0], along[-1], _MARKS)
    return sorted({int(np.abs(np.log(along / place)).argmin()) for place in places})


def dress(axis: Axes, panel: Panel, along: str, label: str) -> None:
    """Set a panel's title, scales, ticks and labels."""
    values = sorted(panel.rows[along].unique())
    if len(values) > _MAX_TICKS:
        # The largest value, and its repeated halves.
        values = [values[-1] // 2**halved for halved in reversed(range(_MAX_TICKS))]
        values = sorted({value for value in values if value >= panel.rows[along].min()})
    axis.set_title(break_title(panel.title))
    scale_log(axis, values, _LABELS[along])
    axis.set_ylabel(label)
