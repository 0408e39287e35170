"""Predicted steps beside published ones: what the scripts that compare them say and draw."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpprof.results.figures.style import SERIES_COLOURS, new_figure

_MARKERS = "osD^vPX*<>"


class Point(NamedTuple):
    """A step, in seconds."""

    source: str
    published: float
    median: float
    low: float
    high: float
    """Of the predicted 90 % interval."""

    is_compiled: bool

    @property
    def error(self) -> float:
        """The predicted median over the published time, less one."""
        return self.median / self.published - 1

    @property
    def is_inside(self) -> bool:
        """Whether the published time lies in the interval."""
        return self.low <= self.published <= self.high


def summarise(groups: Mapping[str, Sequence[Point]]) -> list[str]:
    """Lay out errors and intervals by group, as lines of a table."""
    lines = [
        "| source | steps | median error | median absolute error | inside the 90 % interval |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, group in groups.items():
        errors = [one.error for one in group]
        inside = sum(one.is_inside for one in group)
        lines.append(
            f"| {name} | {len(group)} | {statistics.median(errors):+.1%} "
            f"| {statistics.median(map(abs, errors)):.1%} | {inside} of {len(group)} |"
        )
    return lines


def draw(points: Sequence[Point]) -> Figure:
    """Predicted over published seconds of a step, with 90 % intervals; open: compiled steps."""
    figure, axes = new_figure(row_inches=3.6)
    axis = axes[0, 0]
    looks = {
        name: (SERIES_COLOURS[at % len(SERIES_COLOURS)], _MARKERS[at % len(_MARKERS)])
        for at, name in enumerate(dict.fromkeys(one.source for one in points))
    }
    for one in points:
        colour, marker = looks[one.source]
        axis.errorbar(
            one.published,
            one.median,
            yerr=[[one.median - one.low], [one.high - one.median]],
            color=colour,
            marker=marker,
            markersize=4,
            markerfacecolor="white" if one.is_compiled else colour,
            elinewidth=0.6,
        )
    ends = [min(one.published for one in points) / 1.5, max(one.published for one in points) * 1.5]
    axis.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)
    axis.set(xscale="log", yscale="log", xlabel="published step (s)", ylabel="predicted step (s)")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    handles = [
        Line2D([], [], label=name, color=colour, marker=marker, linestyle="", markersize=4)
        for name, (colour, marker) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure
