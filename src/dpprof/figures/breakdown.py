"""What owns the memory at the peak, how much more is it than without privacy, and does it fit?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.selection import compose_peaks
from dpprof.figures.bars import note, over_baseline, share_legend, stack_panels
from dpprof.figures.panels import split
from dpprof.figures.style import COMPONENT_COLOURS

MISSING = "no run of the instruments memory or estimate succeeded without a target"

_MIB = 2**20
_GIB = 2**30
_MEMORY = "target's memory"
_HERE = "live memory at the peak (MiB)"
_OWNERS = {name: name for name in COMPONENT_COLOURS}


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Live memory by owner at the peak of a steady-state step; numbers are ratios to standard.

    The instrument memory recorded it, or estimate predicted it where memory did not run. The tick
    is the allocator's peak, measured by another process. Unattributed memory has no known owner.
    """
    peaks = compose_peaks(tables)
    panels = split(peaks[peaks["target"].isna()], MISSING, most=4)
    figure, drawn = stack_panels(panels, _OWNERS, COMPONENT_COLOURS, _MIB, _HERE)
    for axis, rows, sizes in drawn:
        measured = rows["allocator_peak_bytes"].astype(float) / _MIB
        axis.plot(measured, range(len(rows)), "|", color="black", markersize=9, markeredgewidth=1.5)
        note(axis, pd.concat([sizes, measured], axis=1).max(axis=1), over_baseline(sizes))
    share_legend(figure, COMPONENT_COLOURS)
    return figure


def draw_predicted(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Predicted live memory by owner at the peak on a target; numbers are ratios to standard.

    The dashed line is the memory that a training can allocate there. The instrument estimate
    predicts the bytes of tensors without the device. The allocator reserves more: see the table of
    predictions.
    """
    peaks = compose_peaks(tables)
    missing = "no run of the instrument estimate succeeded for a target"
    panels = split(peaks[peaks["target"].notna()], missing, most=4)
    figure, drawn = stack_panels(panels, _OWNERS, COMPONENT_COLOURS, _GIB, "predicted peak (GiB)")
    for axis, rows, sizes in drawn:
        note(axis, sizes, over_baseline(sizes))
        memory = rows["target_memory_bytes"].astype(float).max() / _GIB
        if pd.notna(memory):
            axis.axvline(memory, color="black", linestyle="--", linewidth=1, label=_MEMORY)
            axis.set_xlim(0, max(axis.get_xlim()[1], memory * 1.05))
    share_legend(figure, [*COMPONENT_COLOURS, _MEMORY])
    return figure
