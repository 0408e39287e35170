"""What does a method's speed cost in memory?"""

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpprof.analysis.frames import varying_axes
from dpprof.figures.style import method_style, new_figure, say_nothing_to_draw

_MAX_PANELS = 12
_PEAK_LABELS = {"allocated": "peak allocated (MiB)", "rss": "peak RSS (MiB)"}


def draw(experiments: pd.DataFrame) -> Figure:
    """Memory against time: a point per experiment, lower left is better.

    A line joins a method's batch sizes, and the larger the marker, the larger the batch;
    what else differs between experiments has a panel of its own. A point is the median
    over processes; error bars are 95 % bootstrap intervals over processes for time, and
    reach from the smallest to the largest of them for memory.

    Args:
        experiments: The table ``experiments``, one row per experiment.
    """
    drawn = experiments.dropna(subset=["median_step_s", "peak_bytes"])
    if drawn.empty:
        return say_nothing_to_draw("No experiment has both a time and a peak: nothing to draw.")
    others = varying_axes(drawn, but=("model", "seq_len", "method", "batch_size"))
    by = ["model", "seq_len", *others, "peak_kind"]
    panels = list(drawn.groupby(by, dropna=False))
    beyond, panels = len(panels) - _MAX_PANELS, panels[:_MAX_PANELS]
    sizes = {
        batch: 3.0 + 2.0 * rank for rank, batch in enumerate(sorted(drawn["batch_size"].unique()))
    }
    columns = min(2, len(panels))
    figure, axes = new_figure(columns, math.ceil(len(panels) / columns))
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, ((model, seq_len, *values, kind), panel) in zip(axes.flat, panels, strict=False):
        for method, points in panel.groupby("method"):
            _draw_method(axis, str(method), points.sort_values("batch_size"), sizes)
        named = [f"{name} = {value}" for name, value in zip(others, values, strict=True)]
        axis.set_title(", ".join([str(model), f"T = {seq_len}", *named]))
        axis.set_xlabel("step time (ms)")
        axis.set_ylabel(_PEAK_LABELS[str(kind)])
        axis.margins(0.12)
        axis.set_xlim(left=0)
    methods = sorted(drawn["method"].unique(), key=lambda name: (name != "standard", name))
    handles = [Line2D([], [], label=name, **method_style(name)) for name in methods]
    handles += [
        Line2D(
            [], [], label=f"B = {batch}", marker="o", color="grey", linestyle="", markersize=size
        )
        for batch, size in sizes.items()
    ]
    if beyond > 0:
        figure.suptitle(f"{beyond} more panels are not drawn; see results/tables/experiments.csv")
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns)
    return figure


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
