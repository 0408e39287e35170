"""What does a smaller epsilon cost?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from dpprof.analysis.tables.axes import BASELINE
from dpprof.figures.panels import split
from dpprof.figures.style import method_style, sort_methods

_SETTING = ["model", "lora", "parallel", "seq_len", "dtype", "target"]


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """GPU hours over epsilon, for as many steps with as little noise in each; lower is better.

    Every epsilon gets the least batch with which a step's averaged gradient has the same noise, so
    a smaller one takes more samples a step, and hours. With the same batch the hours would not
    depend on epsilon: the noise would. Nothing ran: bars are 90 % intervals of the prediction.
    The dashed line is training without privacy, with the batch of the first epsilon of the config.
    """
    known = tables["budget"].dropna(subset=["gpu_hours"])
    private = known[known["epsilon"].notna()]
    missing = "no privacy budget with hours; see privacy in config/README.md"
    panels = split(private, missing, but=["batch_size", "noise_multiplier"], most=4)
    figure, axes = panels.lay_out()
    for axis, panel in zip(axes, panels.shown, strict=True):
        for method, rows in panel.rows.groupby("method"):
            _draw_method(axis, str(method), rows.sort_values("epsilon"))
        setting = panel.rows[_SETTING].drop_duplicates()
        for hours in known[known["method"] == BASELINE].merge(setting, on=_SETTING)["gpu_hours"]:
            axis.axhline(hours, linestyle="--", linewidth=1, color=method_style(BASELINE)["color"])
        _dress(axis, sorted(set(panel.rows["epsilon"])))
    named = sort_methods({*private["method"], *known.loc[known["epsilon"].isna(), "method"]})
    handles = [Line2D([], [], label=name, **method_style(name)) for name in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _draw_method(axis: Axes, method: str, rows: pd.DataFrame) -> None:
    hours = rows["gpu_hours"]
    ends = [hours - rows["gpu_hours_low"], rows["gpu_hours_high"] - hours]
    style = method_style(method)
    axis.errorbar(
        rows["epsilon"], hours, yerr=ends, linewidth=1, elinewidth=0.6, markersize=4, **style
    )


def _dress(axis: Axes, epsilons: list[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(epsilons)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("epsilon")
    axis.set_ylabel("GPU hours")
    axis.set_ylim(bottom=0)
    axis.margins(x=0.1)
