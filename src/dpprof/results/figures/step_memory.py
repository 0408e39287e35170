"""What holds the memory of one step? Drawn from one result, of `dpprof.estimate`."""

import pandas as pd
from matplotlib.figure import Figure

from dpprof.experiments.records.result import Result
from dpprof.results.figures.bars import VISIBLE, share_legend
from dpprof.results.figures.style import BYTE_UNITS, COMPONENT_COLOURS, choose_byte_unit, new_figure
from dpprof.results.figures.timeline import draw_areas, find_phases, mark_phases

_LETTER = 0.01
"""Width of a letter of a phase's name, as a share of the panel's width."""


def draw(result: Result) -> Figure:
    """Live memory by owner over one steady-state step; the strip on top shows the phases.

    The horizontal axis counts operators, not seconds. Owners below 0.5 % of the peak are left out.
    """
    assert result.memory is not None
    assert result.memory.timeline is not None
    timeline = result.memory.timeline
    owned = pd.DataFrame(timeline.components).reindex(columns=[*COMPONENT_COLOURS], fill_value=0)
    step = owned.assign(ops=timeline.ops, phase=timeline.phase)
    highest = step[list(COMPONENT_COLOURS)].sum(axis=1).max()
    unit = choose_byte_unit(highest)
    figure, axes = new_figure(1, 1, row_inches=2.4)
    axis = axes[0, 0]
    draw_areas(axis, step, BYTE_UNITS[unit], highest * VISIBLE)
    mark_phases(axis, find_phases(step), step["ops"].max(), _LETTER)
    axis.set_xlim(0, step["ops"].max())
    axis.set_ylim(0, highest / BYTE_UNITS[unit] * 1.2)
    axis.set_xlabel("operators run")
    axis.set_ylabel(f"live memory ({unit})")
    share_legend(figure, COMPONENT_COLOURS)
    return figure
