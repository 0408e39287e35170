"""How much memory does a method need for its speed?"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpprof.figures.panels import split
from dpprof.figures.style import method_style, sort_methods

_PEAK_LABELS = {"allocated": "peak allocated (MiB)", "rss": "peak RSS (MiB)"}

_MAX_SIZES = 6
"""With more batch sizes the legend shows only the smallest and the largest."""


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Peak memory over step time, one point per experiment; lower left is better.

    A line joins the batch sizes of a method; larger markers are larger batches. Points are
    medians over processes. Error bars are 95 % bootstrap intervals for time, and the smallest and
    largest process for memory.
    """
    drawn = tables["experiments"].dropna(subset=["median_step_s", "peak_bytes"])
    missing = "no experiment has both a time and a peak"
    panels = split(drawn, missing, but=["batch_size"], also=["peak_kind"], most=8)
    shown = pd.concat([panel.rows for panel in panels.shown])
    sizes = _marker_sizes(sorted(shown["batch_size"].unique()))
    figure, axes = panels.lay_out()
    for axis, panel in zip(axes, panels.shown, strict=True):
        for method, points in panel.rows.groupby("method"):
            _draw_method(axis, str(method), points.sort_values("batch_size"), sizes)
        axis.set_xlabel("step time (ms)")
        axis.set_ylabel(_PEAK_LABELS[panel.rows["peak_kind"].iloc[0]])
        axis.margins(0.12)
        axis.set_xlim(left=0)
    handles = [
        Line2D([], [], label=name, **method_style(name)) for name in sort_methods(shown["method"])
    ]
    told = list(sizes) if len(sizes) <= _MAX_SIZES else [min(sizes), max(sizes)]
    grey: dict[str, Any] = {"marker": "o", "color": "grey", "linestyle": ""}
    handles += [
        Line2D([], [], label=f"B = {batch}", markersize=sizes[batch], **grey) for batch in told
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4 if len(panels.shown) > 1 else 2
    )
    return figure


def _marker_sizes(batches: Sequence[int]) -> dict[int, float]:
    """Return marker sizes in points, growing from the smallest batch to the largest."""
    most = max(1, len(batches) - 1)
    return {batch: 3.0 + 4.0 * rank / most for rank, batch in enumerate(batches)}


def _draw_method(axis: Axes, method: str, points: pd.DataFrame, sizes: Mapping[int, float]) -> None:
    style = method_style(method)
    time_ms, peak_mib = points["median_step_s"] * 1e3, points["peak_bytes"] / 2**20
    axis.plot(time_ms, peak_mib, color=style["color"], linewidth=1)
    for _, point in points.iterrows():
        x, y = point["median_step_s"] * 1e3, point["peak_bytes"] / 2**20
        axis.errorbar(
            x,
            y,
            xerr=None
            if pd.isna(point["step_low_s"])
            else [[x - point["step_low_s"] * 1e3], [point["step_high_s"] * 1e3 - x]],
            yerr=[[y - point["peak_min_bytes"] / 2**20], [point["peak_max_bytes"] / 2**20 - y]],
            markersize=sizes[point["batch_size"]],
            elinewidth=0.8,
            capsize=2,
            **style,
        )
