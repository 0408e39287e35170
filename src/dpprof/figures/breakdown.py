"""Who owns the memory at the peak, and how much more is it than non-private training needs?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.peak_composition import compose
from dpprof.figures.bars import height_of, note, over_baseline, share_legend, stack
from dpprof.figures.panels import split
from dpprof.figures.style import COMPONENT_COLOURS

MISSING = "no run of the instruments memory or estimate succeeded for the device itself"

_MIB = 2**20


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Live bytes by owner at the peak of a step in the steady state; the ratio is to standard.

    Told by the instrument memory, and where that did not run by estimate. A tick marks the
    allocator's peak where another process measured it. Unattributed is what has no known owner.

    Args:
        tables: Of these, ``peaks`` and ``owners``.
    """
    told = compose(tables)
    panels = split(told[told["target"].isna()], MISSING, most=8)
    figure, axes = panels.lay_out(row_inches=height_of(panels))
    for axis, panel in zip(axes, panels.shown, strict=True):
        rows = panel.by_method
        stack(axis, rows[list(COMPONENT_COLOURS)] / _MIB, COMPONENT_COLOURS)
        peaks = rows["peak_bytes"] / _MIB
        measured = rows["allocator_peak_bytes"].astype(float) / _MIB
        axis.plot(measured, range(len(rows)), "|", color="black", markersize=9, markeredgewidth=1.5)
        note(axis, pd.concat([peaks, measured], axis=1).max(axis=1), over_baseline(peaks))
        axis.set_xlabel("alive at the peak (MiB)")
    share_legend(figure, axes, COMPONENT_COLOURS)
    return figure
