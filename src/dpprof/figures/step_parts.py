"""Where in a step does the time go: by phase, by kernel, and by what binds it?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.selection import add_op_kinds, median_over_processes, spread_phases
from dpprof.analysis.tables.axes import RUN_KEY
from dpprof.figures.bars import bracket, note, over_baseline, share_legend, stack_panels
from dpprof.figures.panels import split
from dpprof.figures.style import (
    BOUND_COLOURS,
    OP_KIND_COLOURS,
    PHASE_COLOURS,
    NothingToDrawError,
)

MISSING = "no run of the instrument kernels succeeded"


def draw_phases(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a step by phase; numbers are ratios of the sum to standard's.

    Each part is the median over processes of medians over steps. The error bar spans the
    smallest and the largest sum of a process. The processes wait for the device at the end of
    each phase.
    """
    measured = tables["phases"]
    spread = spread_phases(measured)
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


def draw_op_kinds(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a traced step by op kind (kind of operator); numbers are ratios to standard.

    Norm computes the norms of per-sample gradients; einsum is every other contraction by einsum.
    Clip is the rest of the phase clip, and optimizer is all of the phase step. Idle is time
    without kernels: on a CPU it is Python, autograd and dispatch. All times include the tracer's
    cost.
    """
    if tables["kernels"].empty:
        raise NothingToDrawError(MISSING)
    traces = add_op_kinds(tables["traces"], tables["kernels"])
    parts = {name: f"{name}_s" for name in OP_KIND_COLOURS if f"{name}_s" in traces}
    return _draw(traces, OP_KIND_COLOURS, parts)


def draw_bound(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Compute-bound, memory-bound and idle time of a traced step; numbers are ratios to standard.

    Kernels of one op kind in a phase are compute bound if their FLOPs would take longer than
    their bytes at the measured ceilings, else memory bound. They may still be far from both
    ceilings. Bytes are what operators must read and write, whether or not a cache serves them.
    """
    parts = {name: f"{name.replace(' ', '_')}_s" for name in BOUND_COLOURS}
    return _draw(tables["traces"], BOUND_COLOURS, parts)


def _draw(traces: pd.DataFrame, colours: Mapping[str, str], parts: Mapping[str, str]) -> Figure:
    """Draw the parts of a step as stacked medians over processes; ``parts`` names their columns."""
    panels = split(median_over_processes(traces), MISSING, most=4)
    figure, drawn = stack_panels(panels, parts, colours, 1e-3, "time of a traced step (ms)")
    for axis, _, total in drawn:
        note(axis, total, over_baseline(total))
    share_legend(figure, colours)
    return figure
