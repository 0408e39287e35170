"""Who owns the memory, and how much more is it than non-private training needs?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.figures.bars import height_of, note, over_baseline, share_legend, stack
from dpprof.figures.census import MISSING, by_snapshot
from dpprof.figures.panels import split
from dpprof.figures.style import COMPONENT_COLOURS, sort_methods

_MIB = 2**20


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Memory by owner at the fullest snapshot; a tick marks the peak, with its ratio to standard.

    Owners are told by identity. Unattributed is what no parameter, optimizer or hook leads
    to, mostly activations that autograd keeps. The peak itself lies between snapshots.

    Args:
        tables: Of these, ``components`` and ``experiments``.
    """
    census = by_snapshot(tables)
    total = census.sum(axis=1)
    fullest = census.loc[total.groupby("experiment_id").idxmax()].droplevel("snapshot")
    told = tables["experiments"].merge(fullest, left_on="experiment_id", right_index=True)
    told = told[told["peak_kind"] == "allocated"]
    panels = split(told, MISSING, most=8)
    figure, axes = panels.lay_out(row_inches=height_of(panels))
    for axis, panel in zip(axes, panels.shown, strict=True):
        rows = panel.rows.set_index("method")
        rows = rows.loc[sort_methods(rows.index)]
        stack(
            axis,
            rows[[name for name in COMPONENT_COLOURS if name in rows]] / _MIB,
            COMPONENT_COLOURS,
        )
        peaks = rows["peak_bytes"] / _MIB
        axis.plot(peaks, range(len(peaks)), "|", color="black", markersize=7, markeredgewidth=1.5)
        note(axis, peaks, over_baseline(peaks))
        axis.set_xlabel("allocated (MiB)")
    share_legend(figure, axes, COMPONENT_COLOURS)
    return figure
