"""What holds the memory of one step? Drawn from one result, of `dpprof.estimate`."""

import pandas as pd
from matplotlib.figure import Figure

from dpprof.experiments.records.result import Result
from dpprof.results.figures.bars import share_legend
from dpprof.results.figures.style import BYTE_UNITS, COMPONENT_COLOURS, choose_byte_unit, new_figure
from dpprof.results.figures.timeline import draw_step

_LETTER = 0.01  # width of a letter of a phase's name, as a share of the panel's width


def draw(result: Result) -> Figure:
    """Live memory by owner over one steady-state step; the strip on top shows the phases.

    The horizontal axis counts operators, not seconds. Owners below 0.5 % of the peak are left out.
    """
    assert result.memory is not None
    assert result.memory.timeline is not None
    timeline = result.memory.timeline
    owned = pd.DataFrame(timeline.components).reindex(columns=[*COMPONENT_COLOURS], fill_value=0)
    highest = owned.sum(axis=1).max()
    unit = choose_byte_unit(highest)
    figure, axes = new_figure(row_inches=2.4)
    step = owned.assign(ops=timeline.ops, phase=timeline.phase)
    draw_step(axes[0, 0], step, unit, highest, _LETTER)
    axes[0, 0].set_ylim(0, highest / BYTE_UNITS[unit] * 1.2)
    axes[0, 0].set_ylabel(f"live memory ({unit})")
    share_legend(figure, COMPONENT_COLOURS)
    return figure
