"""How many tokens per second does a method reach, and what share of the device's peak is that?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.selection import choose_runs, find_here
from dpprof.results.analysis.tables.axes import BASELINE, SETTING, name_speed
from dpprof.results.figures.bars import bracket, height_of, name_bars
from dpprof.results.figures.panels import break_title, split
from dpprof.results.figures.style import NothingToDrawError, method_style, new_figure, tell

_LEAST = 2
_MISSING = "no two methods were timed in one setting"
_HFU, _MFU = "#CCCCCC", "#444444"


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
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
        raise NothingToDrawError(_MISSING)
    panel = split(chosen, _MISSING, most=1).shown[0]
    rows = panel.sorted_by(-panel.rows["tokens_per_s"].astype(float))
    has_peak = rows["hfu"].notna().any()
    figure, axes = new_figure(2 if has_peak else 1, row_inches=height_of(len(rows)))
    tokens = axes[0, 0]
    _draw_tokens(tokens, rows)
    tokens.set_title(break_title(panel.title), loc="right")
    if has_peak:
        shares = axes[0, 1]
        _draw_shares(shares, rows)
        shares.set_title("share of peak FLOP/s")
        figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    best = rows.iloc[0] if rows.index[0] != BASELINE or len(rows) == 1 else rows.iloc[1]
    speed = f"{best['tokens_per_s']:,.0f} {name_speed([best])}"
    tell(figure, f"The fastest private method for {panel.title}, {best.name}, reaches {speed}.")
    return figure


def _draw_tokens(axis: Axes, rows: pd.DataFrame) -> None:
    colours = [method_style(str(name))["color"] for name in rows.index]
    axis.barh(range(len(rows)), rows["tokens_per_s"], color=colours, height=0.7)
    tokens = rows["tokens_per_s"] * rows["median_step_s"]
    bracket(axis, tokens / rows["step_high_s"], tokens / rows["step_low_s"])
    name_bars(axis, map(str, rows.index))
    axis.set_xlabel(name_speed(row for _, row in rows.iterrows()))


def _draw_shares(axis: Axes, rows: pd.DataFrame) -> None:
    places = range(len(rows))
    axis.barh(places, rows["hfu"].astype(float) * 100, color=_HFU, height=0.7, label="HFU")
    axis.barh(places, rows["mfu"].astype(float) * 100, color=_MFU, height=0.35, label="MFU")
    if (rows["hfu"] > 1).any():
        axis.axvline(100, color="black", linestyle="--", linewidth=1)
    name_bars(axis, [""] * len(rows))
    axis.set_xlabel("% of the peak")
