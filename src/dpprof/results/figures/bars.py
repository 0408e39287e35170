"""Stacked bars, one per method, with the same look in every figure."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.tables.axes import BASELINE
from dpprof.results.figures.style import HATCHES, PAGE_INCHES, method_style

VISIBLE = 0.005  # a part below this share of the longest bar would be invisible
_LEGEND_ROW_INCHES = 0.17


def stack(axis: Axes, parts: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw a horizontal bar for each row, the first on top; leave out invisible parts.

    ``parts`` are lengths, one row per bar and one column per part; ``colours`` are in stacking
    order.
    """
    rows = range(len(parts))
    left = pd.Series(0.0, index=parts.index)
    least = parts.sum(axis=1).max() * VISIBLE
    for name, colour in colours.items():
        if name in parts and (parts[name] > least).any():
            axis.barh(
                rows,
                parts[name].fillna(0),
                left=left,
                height=0.7,
                color=colour,
                hatch=HATCHES.get(name),
                edgecolor="#333333",
                linewidth=0.4,
                label=name.replace("_", " "),
            )
            left = left + parts[name].fillna(0)
    name_bars(axis, map(str, parts.index))


def name_bars(axis: Axes, names: Iterable[str]) -> None:
    """Write a name beside each bar, the first on top."""
    labels = list(names)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")


def height_of(bars: int) -> float:
    """Return the height of a row of panels, in inches, that keeps this many bars apart."""
    return 0.65 + 0.17 * bars


def bracket(axis: Axes, low: "pd.Series[float]", high: "pd.Series[float]") -> None:
    """Draw an error bar over each bar whose lower and upper ends are known."""
    # Centred between low and high, because the bar itself may end outside them.
    middle, reach = (low + high).astype(float) / 2, (high - low).astype(float) / 2
    style: dict[str, Any] = {"ecolor": "black", "elinewidth": 0.8, "capsize": 2}
    axis.errorbar(middle, range(len(low)), xerr=reach, fmt="none", **style)


def draw_bars(
    axis: Axes, lengths: "pd.Series[float]", low: "pd.Series[float]", high: "pd.Series[float]"
) -> None:
    """Draw a bar with an error bar for each method, which the index names."""
    colours = [method_style(str(name))["color"] for name in lengths.index]
    axis.barh(range(len(lengths)), lengths, color=colours, height=0.7)
    bracket(axis, low, high)
    name_bars(axis, map(str, lengths.index))


def over_baseline(lengths: "pd.Series[float]") -> "pd.Series[str]":
    """Return each length, by method, as a multiple of the baseline's; empty without a baseline."""
    if BASELINE not in lengths.index:
        return pd.Series("", index=lengths.index)
    base = float(lengths[[BASELINE]].iloc[0])
    return (lengths / base).map("{:.2f}x".format)


def share_legend(figure: Figure, names: Iterable[str]) -> None:
    """Draw one legend under all panels, in the order of the names, and make room for it."""
    drawn = {
        label: handle
        for axis in figure.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    labels = [label for name in names if (label := name.replace("_", " ")) in drawn]
    handles = [drawn[label] for label in labels]
    rows = math.ceil(len(labels) / (2 if len(figure.axes) == 1 else 5))
    figure.set_figheight(min(figure.get_figheight() + _LEGEND_ROW_INCHES * rows, PAGE_INCHES))
    columns = math.ceil(len(labels) / rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
