"""How much memory does a method need for its speed?"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.selection import find_here
from dpprof.figures.labels import label_points
from dpprof.figures.panels import split
from dpprof.figures.style import COLUMN_INCHES, method_style, new_figure

_PEAKS = {"allocated": "peak allocated", "rss": "peak RSS"}
_MISSING = "no experiment has both a time and a peak"


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Peak memory over step time, one point per method; lower left is better.

    Both are multiples of standard's, where it was measured. The setting is that of the largest
    model in which most methods were measured. Points are medians over processes. Error bars are
    95 % bootstrap intervals for time, and the smallest and largest process for memory.
    """
    rows = find_here(tables["experiments"]).dropna(subset=["median_step_s", "peak_bytes"])
    rows = rows[rows["peak_kind"] == rows["peak_kind"].min()]  # peaks of two kinds do not compare
    title = split(rows.head(1), _MISSING).shown[0].title
    axis_names = "step time", _PEAKS[rows["peak_kind"].iloc[0]]
    if rows["step_ratio"].notna().all() and rows["peak_ratio"].notna().all():
        points, units = rows.apply(_over_standard, axis=1), ("times standard",) * 2
    else:
        points, units = rows.apply(_absolute, axis=1), ("ms", "MiB")
    figure, axes = new_figure(row_inches=2.4, width_inches=2 * COLUMN_INCHES)
    axis = axes[0, 0]
    for method, point in zip(rows["method"], points, strict=True):
        axis.errorbar(
            point.x,
            point.y,
            xerr=_reach(point.x, point.across),
            yerr=_reach(point.y, point.up),
            markersize=5,
            elinewidth=0.8,
            capsize=2,
            **method_style(str(method)),
        )
    axis.set_xlabel(f"{axis_names[0]} ({units[0]})")
    axis.set_ylabel(f"{axis_names[1]} ({units[1]})")
    axis.set_title(title)
    axis.margins(0.12)
    label_points(
        figure,
        axis,
        [(point.x, point.y) for point in points],
        [str(name) for name in rows["method"]],
        [((low, point.y), (high, point.y)) for point in points for low, high in [point.across]],
    )
    return figure


class _Point(NamedTuple):
    x: float
    y: float
    across: tuple[float, float]
    up: tuple[float, float]


def _over_standard(row: Any) -> _Point:
    base = row["peak_bytes"] / row["peak_ratio"]
    return _Point(
        row["step_ratio"],
        row["peak_ratio"],
        _or_point(row["step_ratio_low"], row["step_ratio_high"], row["step_ratio"]),
        (row["peak_min_bytes"] / base, row["peak_max_bytes"] / base),
    )


def _absolute(row: Any) -> _Point:
    step = row["median_step_s"]
    low, high = _or_point(row["step_low_s"], row["step_high_s"], step)
    return _Point(
        step * 1e3,
        row["peak_bytes"] / 2**20,
        (low * 1e3, high * 1e3),
        (row["peak_min_bytes"] / 2**20, row["peak_max_bytes"] / 2**20),
    )


def _or_point(low: float, high: float, point: float) -> tuple[float, float]:
    return (point, point) if pd.isna(low) or pd.isna(high) else (low, high)


def _reach(middle: float, ends: tuple[float, float]) -> list[list[float]] | None:
    """Return an error bar's lengths below and above; None where it has none."""
    low, high = ends
    return [[middle - low], [high - middle]] if high > low else None
