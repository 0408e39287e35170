"""What do the memory at the peak and the time of a step consist of, and does it fit?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.selection import (
    add_op_kinds,
    compose_peaks,
    median_over_processes,
    spread_phases,
)
from dpprof.analysis.tables.axes import RUN_KEY
from dpprof.figures.bars import bracket, note, over_baseline, share_legend, stack_panels
from dpprof.figures.panels import split
from dpprof.figures.style import (
    BOUND_COLOURS,
    COMPONENT_COLOURS,
    OP_KIND_COLOURS,
    PHASE_COLOURS,
    NothingToDrawError,
)

MISSING = "no run of the instrument kernels succeeded"

_MIB = 2**20
_GIB = 2**30
_MEMORY = "target's memory"
_HERE = "live memory at the peak (MiB)"
_OWNERS = {name: name for name in COMPONENT_COLOURS}


def draw_breakdown(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Live memory by owner at the peak of a steady-state step; numbers are ratios to standard.

    The instrument memory recorded it, or estimate predicted it where memory did not run. The tick
    is the allocator's peak, measured by another process. Unattributed memory has no known owner.
    """
    peaks = compose_peaks(tables)
    missing = "no run of the instruments memory or estimate succeeded without a target"
    panels = split(peaks[peaks["target"].isna()], missing, most=4)
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
