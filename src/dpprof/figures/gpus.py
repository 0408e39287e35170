"""What do more GPUs bring, and what do tokens cost on them?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from dpprof.analysis.advice.scaling import BILLION
from dpprof.figures.style import NothingToDrawError, method_style, new_figure, sort_methods
from dpprof.spec.parallel import read_world_size

_SETTING = ["model", "lora", "seq_len", "image_size", "dtype", "target", "execution", "head"]
_MOST = 4
_SPEED = "tokens_per_s"


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Tokens per second of all GPUs, and GPU hours for a billion tokens, over the number of GPUs.

    Each method trains with its largest safe batch on every GPU. Nothing ran: bars are 90 %
    intervals of the prediction. The price of tokens is their GPU hours times that of a GPU hour:
    a line that stays level costs the same on any number of GPUs.
    """
    rows = tables["advice"]
    rows = rows.assign(gpus=rows["parallel"].map(read_world_size)).dropna(subset=[_SPEED])
    setting = [name for name in _SETTING if name in rows]
    groups = [
        group
        for _, group in rows.groupby(setting, dropna=False, sort=False)
        if len(set(group["gpus"])) > 1
    ]
    if not groups:
        raise NothingToDrawError("no capacities with predicted times on several numbers of GPUs")
    groups = groups[:_MOST]
    figure, axes = new_figure(2, len(groups), row_inches=2.4)
    for (speed, cost), group in zip(axes, groups, strict=True):
        for method, points in group.groupby("method"):
            _draw_method(speed, cost, str(method), points.sort_values("gpus"))
        _dress(speed, group, "tokens per second, all GPUs")
        _dress(cost, group, "GPU hours per 10⁹ tokens")
        first = group.iloc[0]
        speed.set_title(f"{first['model']}, T {first['seq_len']:,}, {first['dtype']}", loc="left")
    named = sort_methods({str(method) for group in groups for method in group["method"]})
    handles = [Line2D([], [], label=name, **method_style(name)) for name in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _draw_method(speed: Axes, cost: Axes, method: str, points: pd.DataFrame) -> None:
    style = method_style(method)
    known = points[[f"{_SPEED}{end}" for end in ("", "_low", "_high")]].astype(float)
    hours = known.rdiv(points["gpus"] * BILLION / 3600, axis=0)
    hours.columns = [f"{_SPEED}{end}" for end in ("", "_high", "_low")]  # slow is dear
    for axis, values in ((speed, known), (cost, hours)):
        middle = values[_SPEED]
        ends = [middle - values[f"{_SPEED}_low"], values[f"{_SPEED}_high"] - middle]
        axis.errorbar(
            points["gpus"], middle, yerr=ends, linewidth=1, elinewidth=0.6, markersize=4, **style
        )


def _dress(axis: Axes, group: pd.DataFrame, label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted(set(group["gpus"])))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axis.set_xlabel("GPUs")
    axis.set_ylabel(label)
