"""How fast is a method, how much memory does it need for that, and how busy is the device?"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.selection import choose_runs, find_here
from dpprof.results.analysis.tables.axes import BASELINE, SETTING, name_speed
from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.figures.bars import draw_bars, height_of, name_bars
from dpprof.results.figures.labels import label_points
from dpprof.results.figures.panels import break_title, split
from dpprof.results.figures.style import (
    COLUMN_INCHES,
    NothingToDrawError,
    method_style,
    new_figure,
    tell,
)

_PEAKS = {"allocated": "peak allocated", "rss": "peak RSS"}
_RATIOS = ("times standard", "times standard")
_HFU, _MFU = "#CCCCCC", "#444444"
_LEAST = 2  # methods that can be compared


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Peak memory over step time, one point per method; lower left is better.

    Points are medians over processes. Error bars are 95 % intervals for time, and the smallest and
    largest process for memory.
    """
    rows = find_here(tables["experiments"]).dropna(subset=["median_step_s", "peak_bytes"])
    rows = rows[rows["peak_kind"] == rows["peak_kind"].min()]  # peaks of two kinds do not compare
    if len(rows) < _LEAST:
        raise NothingToDrawError("no two methods have both a time and a peak in one setting")
    title = split(rows.head(1), "").shown[0].title
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


def _reach(
    middle: "pd.Series[float]", low: "pd.Series[float]", high: "pd.Series[float]"
) -> npt.NDArray[np.float64]:
    """Return the lengths of error bars below and above; unknown where there is none."""
    is_known = high > low
    return np.array([(middle - low).where(is_known), (high - middle).where(is_known)], dtype=float)


def _say_extremes(private: pd.DataFrame, title: str) -> str:
    if private.empty:
        return ""
    fastest = least_of(private, "median_step_s")["method"]
    lowest = least_of(private, "peak_bytes")["method"]
    peak = ", with" if fastest == lowest else f"; {lowest} has"
    return f"Of the private methods for {title}, {fastest} is fastest{peak} the lowest peak."


def draw_throughput(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Tokens per second, and FLOP/s as a share of the device's peak where that is known.

    MFU counts the FLOPs that the non-private step needs, HFU those that are executed. The peak is
    the dense one of the dtype in use; values beyond it (dashed line) are wrong. Error bars are 95 %
    intervals over processes.
    """
    timed = tables["experiments"].dropna(subset=["tokens_per_s"])
    used = choose_runs(tables["costs"])[["experiment_id", "mfu", "hfu"]]
    timed = timed.merge(used, on="experiment_id", how="left")
    if timed["hfu"].notna().any():
        keys = [timed[name] for name in SETTING]
        timed = timed[timed["hfu"].notna().groupby(keys, dropna=False).transform("any")]
    chosen = find_here(timed)
    if len(chosen) < _LEAST:
        raise NothingToDrawError("no two methods were timed in one setting")
    panel = split(chosen, "", most=1).shown[0]
    rows = panel.sorted_by(-panel.rows["tokens_per_s"].astype(float))
    has_peak = rows["hfu"].notna().any()
    figure, axes = new_figure(2 if has_peak else 1, row_inches=height_of(len(rows)))
    tokens = rows["tokens_per_s"] * rows["median_step_s"]
    low, high = tokens / rows["step_high_s"], tokens / rows["step_low_s"]
    draw_bars(axes[0, 0], rows["tokens_per_s"], low, high)
    axes[0, 0].set_xlabel(name_speed(row for _, row in rows.iterrows()))
    axes[0, 0].set_title(break_title(panel.title), loc="right")
    if has_peak:
        _draw_shares(axes[0, 1], rows)
        legend = axes[0, 1].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=2)
    best = rows.iloc[0] if rows.index[0] != BASELINE or len(rows) == 1 else rows.iloc[1]
    speed = f"{best['tokens_per_s']:,.0f} {name_speed([best])}"
    tell(figure, f"The fastest private method for {panel.title}, {best.name}, reaches {speed}.")
    return figure


def _draw_shares(axis: Axes, rows: pd.DataFrame) -> None:
    places = range(len(rows))
    axis.barh(places, rows["hfu"].astype(float) * 100, color=_HFU, height=0.7, label="HFU")
    axis.barh(places, rows["mfu"].astype(float) * 100, color=_MFU, height=0.35, label="MFU")
    if (rows["hfu"] > 1).any():
        axis.axvline(100, color="black", linestyle="--", linewidth=1)
    name_bars(axis, [""] * len(rows))
    axis.set_xlabel("% of the peak")
    axis.set_title("share of peak FLOP/s")
