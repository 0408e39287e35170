"""What does a smaller epsilon cost?"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpprof.results.analysis.tables.axes import BASELINE, WITHOUT_BATCH
from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.figures.bars import draw_bars, height_of
from dpprof.results.figures.labels import label_ends
from dpprof.results.figures.panels import Panel, split
from dpprof.results.figures.style import method_style, scale_log, sort_methods, tell

_MOST_LABELS = 4  # more lines get a legend instead of names at their ends


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """GPU hours over epsilon; lower is better.

    The number of steps and the noise of the averaged gradient are fixed, so a smaller epsilon needs
    more samples a step. Predicted: bars are 90 % intervals. Dashed: without privacy.
    """
    costs = tables["budget"].dropna(subset=["gpu_hours"])
    private = costs[costs["epsilon"].notna()]
    missing = "no privacy budget with hours; see privacy in config/README.md"
    panels = split(private, missing, but=["batch_size", "noise_multiplier"], most=4)
    epsilons = sorted(set(private["epsilon"]))
    methods = {*private["method"], *costs.loc[costs["epsilon"].isna(), "method"]}
    high = height_of(len(methods)) if len(epsilons) == 1 else 1.34
    figure, axes = panels.lay_out(row_inches=high)
    plain = costs[costs["method"] == BASELINE]
    drawn = [
        (axis, rows, plain.merge(rows[WITHOUT_BATCH].drop_duplicates(), on=WITHOUT_BATCH))
        for axis, (_, rows) in zip(axes, panels.shown, strict=True)
    ]
    if len(epsilons) == 1:
        for axis, rows, plain in drawn:
            ordered = pd.concat([rows, plain]).sort_values("gpu_hours").set_index("method")
            draw_bars(axis, *(ordered[f"gpu_hours{end}"] for end in ("", "_low", "_high")))
            axis.set_xlabel("GPU hours")
        return figure
    for axis, rows, plain in drawn:
        _draw_lines(axis, rows, plain, epsilons)
    _name_lines(figure, drawn, sort_methods(methods))
    tell(figure, _say(panels.shown[0], epsilons, is_one=len(panels.shown) == 1))
    return figure


def _draw_lines(axis: Axes, rows: pd.DataFrame, plain: pd.DataFrame, epsilons: list[float]) -> None:
    style: dict[str, Any] = {"linewidth": 1, "elinewidth": 0.6, "markersize": 4}
    for method, costs in rows.sort_values("epsilon").groupby("method"):
        hours = costs["gpu_hours"]
        ends = [hours - costs["gpu_hours_low"], costs["gpu_hours_high"] - hours]
        axis.errorbar(costs["epsilon"], hours, yerr=ends, **method_style(str(method)) | style)
    for hours in plain["gpu_hours"]:
        axis.axhline(hours, linestyle="--", linewidth=1, color=method_style(BASELINE)["color"])
    scale_log(axis, epsilons, "epsilon", base=10)
    axis.set_ylabel("GPU hours")


def _name_lines(
    figure: Figure, drawn: list[tuple[Axes, pd.DataFrame, pd.DataFrame]], methods: list[str]
) -> None:
    """Name the lines at their ends where they are few, else in a legend."""
    if len(methods) > _MOST_LABELS:
        handles = [Line2D([], [], label=name, **method_style(name)) for name in methods]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return
    figure.draw_without_rendering()
    dashed = {BASELINE: {"linestyle": "--", "marker": ""}}
    for axis, rows, plain in drawn:
        last = rows.loc[rows.groupby("method")["epsilon"].idxmax()]
        ends = [(row["epsilon"], row["gpu_hours"], row["method"]) for _, row in last.iterrows()]
        ends += [(rows["epsilon"].max(), hours, BASELINE) for hours in plain["gpu_hours"]]
        label_ends(axis, ends, style_of=lambda name: method_style(name) | dashed.get(name, {}))


def _say(panel: Panel, epsilons: list[float], *, is_one: bool) -> str:
    rows = panel.rows[panel.rows["verified"].ne(False)]
    if rows.empty:
        return ""
    least = least_of(rows, "gpu_hours")
    costs = rows[rows["method"] == least["method"]].set_index("epsilon")["gpu_hours"]
    low, high = epsilons[0], epsilons[-1]
    if not {low, high} <= set(costs.index):
        return ""
    where = "" if is_one else f", {panel.title}"
    times = costs[low] / costs[high]
    return (
        f"A smaller epsilon needs more samples a step: epsilon {low:g} takes {times:.1f} times the "
        f"hours of epsilon {high:g} ({least['method']}{where})."
    )
