"""Where in a step does the time go?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.tables.axes import RUN_KEY
from dpprof.figures.bars import bracket, note, over_baseline, share_legend, stack_panels
from dpprof.figures.panels import split
from dpprof.figures.style import PHASE_COLOURS


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a step by phase; numbers are ratios of the sum to standard's.

    Each part is the median over processes of medians over steps. The error bar spans the
    smallest and the largest sum of a process. The processes wait for the device at the end of
    each phase.
    """
    measured = tables["phases"]
    over_processes = measured.groupby(["experiment_id", "phase"])["median_s"].median()
    spread = over_processes.unstack()  # noqa: PD010 (there is nothing to aggregate)
    experiments = tables["experiments"].merge(
        spread.join(_reach(measured)), left_on="experiment_id", right_index=True
    )
    panels = split(experiments, "no run of the instrument phases succeeded", most=4)
    phases = {phase: phase for phase in PHASE_COLOURS if phase in experiments}
    figure, drawn = stack_panels(panels, phases, PHASE_COLOURS, 1e-3, "time of a step (ms)")
    for axis, rows, total in drawn:
        low, high = rows["least_s"] * 1e3, rows["most_s"] * 1e3
        bracket(axis, low, high)
        note(axis, pd.concat([total, high], axis=1).max(axis=1), over_baseline(total))
    share_legend(figure, PHASE_COLOURS)
    return figure


def _reach(phases: pd.DataFrame) -> pd.DataFrame:
    """Return, per experiment, the smallest and the largest sum of a process's phases."""
    sums = phases.groupby(RUN_KEY)["median_s"].sum().groupby("experiment_id")
    reach = pd.DataFrame({"least_s": sums.min(), "most_s": sums.max()})
    return reach[sums.count() > 1]
