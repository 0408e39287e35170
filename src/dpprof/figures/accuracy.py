"""How far is the recorded peak from the allocator's?"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from dpprof.analysis.groups import RECORDERS
from dpprof.analysis.tables.axes import BASELINE
from dpprof.figures.style import NothingToDrawError, method_style, new_figure, sort_methods

_MIB = 2**20
_MOST_MARKS = 500
"""More marks hide one another."""

_PARTS = 24
_TICKS = ((1, 1.5, 2, 3, 5, 7), (1, 3), (1,))
"""Tick positions for a range within one decade, two decades, or more."""


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Recorded minus allocator's peak, in percent of the latter, over the allocator's peak.

    Filled marks are recorded peaks, empty ones are estimated without a run. On the line both peaks
    are equal; below it the allocator held more. A gap outside the grey bar is a finding. The
    allocator's peak is from another process. Of more than 500 peaks, those of each method with the
    largest gap in each of 24 parts of the axis are shown.
    """
    peaks = tables["peaks"]
    known = peaks[peaks["instrument"].isin(RECORDERS)].dropna(subset=["allocator_peak_bytes"])
    if known.empty:
        raise NothingToDrawError(
            "no recorded or estimated peak has an allocator's peak to compare with"
        )
    many = len(known) > _MOST_MARKS
    if many:
        known = _keep_largest_gaps(known)
    columns = ["allocator_peak_bytes", "bound_bytes", "gap_bytes"]
    allocator, bound, gap = (known[name].astype(float) for name in columns)
    figure, axes = new_figure(row_inches=2.8)
    axis = axes[0, 0]
    share = bound / allocator * 100
    axis.vlines(allocator / _MIB, -share, share, color="#DDDDDD", linewidth=5)
    axis.axhline(0, color="black", linewidth=0.8)
    for (instrument, method), rows in known.groupby(["instrument", "method"]):
        axis.plot(
            allocator[rows.index] / _MIB,
            -gap[rows.index] / allocator[rows.index] * 100,
            linestyle="",
            **_style(str(instrument), str(method)) | ({"markersize": 4} if many else {}),
        )
    axis.set_xscale("log")
    decades = math.log10(allocator.max() / allocator.min())
    axis.xaxis.set_major_locator(LogLocator(subs=_TICKS[min(int(decades), 2)]))
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("allocator's peak (MiB)")
    axis.set_ylabel("gap to the allocator (%)")
    axis.margins(0.1)
    handles = [
        Line2D([], [], label=name, linestyle="", **_style("memory", name))
        for name in sort_methods(known["method"])
    ]
    handles += [
        Line2D([], [], label=name, linestyle="", **(_style(name, BASELINE) | {"marker": "o"}))
        for name in sorted(set(known["instrument"]))
    ]
    handles.append(Line2D([], [], label="within bounds", color="#DDDDDD", linewidth=5))
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _keep_largest_gaps(peaks: pd.DataFrame) -> pd.DataFrame:
    """Return of each method the peaks whose gap is the largest share, in parts of the axis."""
    allocator = peaks["allocator_peak_bytes"].astype(float)
    edges = np.geomspace(allocator.min(), allocator.max(), _PARTS + 1)
    marks = peaks.assign(
        _part=np.searchsorted(edges, allocator, side="left"),
        _share=(peaks["gap_bytes"].astype(float) / allocator).abs(),
    ).sort_values("_share", ascending=False, kind="stable")
    kept = marks.drop_duplicates(["instrument", "method", "_part"])
    return peaks.loc[kept.index.sort_values()]


def _style(instrument: str, method: str) -> dict[str, Any]:
    """Return a mark's style; an estimate's mark is empty and larger than a recorded one."""
    style = method_style(method)
    if instrument == "memory":
        return style | {"markersize": 4}
    empty = {"fillstyle": "none", "markeredgecolor": style["color"], "markeredgewidth": 0.9}
    return style | empty | {"markersize": 8}
