"""How far is each part of a step from the device's ceilings?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.figures import style
from dpprof.results.figures.panels import MAX_PANELS, Panel, Panels, split

_LEAST_SHARE = 0.01  # parts below this share of a step's time have no point
_BESIDE = 3  # panels beside one another
_AREA = 300.0  # area, in square points, of the marker of a part that takes the whole step


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Roofline: FLOP/s over FLOPs per byte, one point per op kind and phase.

    Lines are the device's measured ceilings. A point's area is its share of the step's time; parts
    below 1 % have none. Caches can lift a point above the slope.
    """
    kernels = tables["kernels"].dropna(
        subset=["arithmetic_intensity", "flops_per_s", "ceiling_flops_per_s", "ceiling_bytes_per_s"]
    )
    of_step = kernels["seconds"] / kernels.groupby("experiment_id")["seconds"].transform("sum")
    kernels = kernels[(kernels["flops"] > 0) & (of_step >= _LEAST_SHARE)]
    if kernels.empty:
        raise style.NothingToDrawError(
            "no run of the instrument kernels has both counted FLOPs and measured ceilings"
        )
    panel = split(kernels, "", most=1).shown[-1]
    methods = style.sort_methods(panel.rows["method"])[:MAX_PANELS]
    shown = [Panel(name, panel.rows[panel.rows["method"] == name]) for name in methods]
    figure, axes = Panels(shown, 0).lay_out(
        _BESIDE, row_inches=2.0 if len(shown) <= _BESIDE else 1.4, sharex=True, sharey=True
    )
    for axis, part in zip(axes, shown, strict=True):
        _draw_method(axis, part.rows)
        _dress(axis, panel.rows)
        axis.set_ylabel("GFLOP/s")
        axis.set_xlabel("FLOPs per byte")
        axis.label_outer()
    figure.suptitle(panel.title, fontsize=8)
    _explain(figure, panel.rows)
    style.tell(figure, _say_longest(panel.rows))
    return figure


def _say_longest(rows: pd.DataFrame) -> str:
    part = least_of(rows, "seconds", -1)
    slope = part["ceiling_bytes_per_s"] * part["arithmetic_intensity"]
    share = part["flops_per_s"] / min(slope, part["ceiling_flops_per_s"])
    phase = str(part["phase"]).replace("_", " ")
    return (
        f"The longest part of a step, {part['op_kind']} in {phase} with {part['method']}, reaches "
        f"{100 * share:.0f} % of the ceiling above it."
    )


def _draw_method(axis: Axes, rows: pd.DataFrame) -> None:
    share = rows["seconds"] / rows["seconds"].sum()
    roof = rows.iloc[0]
    slope, flat = float(roof["ceiling_bytes_per_s"]), float(roof["ceiling_flops_per_s"])
    reach = np.geomspace(1e-6, 1e6, 500)
    axis.plot(reach, np.minimum(slope * reach, flat) / 1e9, color="black", linewidth=1)
    axis.axvline(flat / slope, color="black", linewidth=0.5, linestyle=":")
    for (_, point), part in zip(rows.iterrows(), share, strict=True):
        axis.scatter(
            point["arithmetic_intensity"],
            point["flops_per_s"] / 1e9,
            s=max(8.0, _AREA * part),
            marker=style.PHASE_MARKERS[point["phase"]],
            color=style.OP_KIND_COLOURS[point["op_kind"]],
            edgecolor="#333333",
            linewidth=0.5,
            alpha=0.85,
            zorder=3,
        )


def _dress(axis: Axes, rows: pd.DataFrame) -> None:
    """Give all panels the same limits, a little beyond the outermost points."""
    roof = rows[["ceiling_flops_per_s", "ceiling_bytes_per_s"]].max()
    ridge = roof["ceiling_flops_per_s"] / roof["ceiling_bytes_per_s"]
    along = [*rows["arithmetic_intensity"], ridge]
    upwards = [*(rows["flops_per_s"] / 1e9), roof["ceiling_flops_per_s"] / 1e9]
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(min(along) / 3, max(along) * 5)
    axis.set_ylim(min(upwards) / 3, max(upwards) * 3)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(numticks=5))
        side.set_major_formatter(lambda value, _: f"{value:g}")
        side.set_minor_locator(NullLocator())


def _explain(figure: Figure, rows: pd.DataFrame) -> None:
    there: Any = {"linestyle": "", "markeredgecolor": "#333333", "markeredgewidth": 0.4}
    handles = [
        Line2D([], [], marker="s", color=colour, label=name, **there)
        for name, colour in style.OP_KIND_COLOURS.items()
        if name in set(rows["op_kind"])
    ]
    handles += [
        Line2D([], [], marker=marker, color="white", label=name.replace("_", " "), **there)
        for name, marker in style.PHASE_MARKERS.items()
        if name in set(rows["phase"])
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
