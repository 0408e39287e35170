"""How much memory does a method need for its speed?"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from dpprof.results.analysis.selection import find_here
from dpprof.results.analysis.tables.axes import BASELINE
from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.figures.labels import label_points
from dpprof.results.figures.panels import split
from dpprof.results.figures.style import (
    COLUMN_INCHES,
    NothingToDrawError,
    method_style,
    new_figure,
    tell,
)

_PEAKS = {"allocated": "peak allocated", "rss": "peak RSS"}
_RATIOS = ("times standard", "times standard")
_LEAST = 2
_MISSING = "no two methods have both a time and a peak in one setting"


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Peak memory over step time, one point per method; lower left is better.

    Points are medians over processes. Error bars are 95 % intervals for time, and the smallest and
    largest process for memory.
    """
    rows = find_here(tables["experiments"]).dropna(subset=["median_step_s", "peak_bytes"])
    rows = rows[rows["peak_kind"] == rows["peak_kind"].min()]  # peaks of two kinds do not compare
    if len(rows) < _LEAST:
        raise NothingToDrawError(_MISSING)
    title = split(rows.head(1), _MISSING).shown[0].title
    peak_name = _PEAKS[rows["peak_kind"].iloc[0]]
    if rows["step_ratio"].notna().all() and rows["peak_ratio"].notna().all():
        x, low, high = (rows[name] for name in ("step_ratio", "step_ratio_low", "step_ratio_high"))
        y, base, units = rows["peak_ratio"], rows["peak_bytes"] / rows["peak_ratio"], _RATIOS
    else:
        x, low, high = (rows[name] * 1e3 for name in ("median_step_s", "step_low_s", "step_high_s"))
        y, base, units = rows["peak_bytes"] / 2**20, 2**20, ("ms", "MiB")
    across = _reach(x, low, high)
    up = _reach(y, rows["peak_min_bytes"] / base, rows["peak_max_bytes"] / base)
    names, points = list(map(str, rows["method"])), list(zip(x, y, strict=True))
    figure, axes = new_figure(row_inches=2.4, width_inches=2 * COLUMN_INCHES)
    axis = axes[0, 0]
    for row, method in enumerate(names):
        style = method_style(method) | {"markersize": 5, "elinewidth": 0.8, "capsize": 2}
        axis.errorbar(*points[row], xerr=across[:, [row]], yerr=up[:, [row]], **style)
    axis.set_xlabel(f"step time ({units[0]})")
    axis.set_ylabel(f"{peak_name} ({units[1]})")
    axis.set_title(title)
    axis.margins(0.12)
    ends = zip(low.fillna(x), high.fillna(x), y, strict=True)
    label_points(figure, axis, points, names, [((a, y), (b, y)) for a, b, y in ends])
    tell(figure, _say_extremes(rows[rows["method"] != BASELINE], title))
    return figure


def _say_extremes(private: pd.DataFrame, title: str) -> str:
    """Say which private method is fastest, and which has the lowest peak."""
    if private.empty:
        return ""
    fastest = least_of(private, "median_step_s")["method"]
    lowest = least_of(private, "peak_bytes")["method"]
    if fastest == lowest:
        return f"Of the private methods for {title}, {fastest} is fastest, with the lowest peak."
    return (
        f"Of the private methods for {title}, {fastest} is fastest; {lowest} has the lowest peak."
    )


def _reach(
    middle: "pd.Series[float]", low: "pd.Series[float]", high: "pd.Series[float]"
) -> npt.NDArray[np.float64]:
    """Return the lengths of error bars below and above; unknown where there is none."""
    is_known = high > low
    return np.array([(middle - low).where(is_known), (high - middle).where(is_known)], dtype=float)
