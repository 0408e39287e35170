"""What do the memory at the peak and the time of a step consist of, and does it fit?"""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.selection import (
    add_op_kinds,
    compose_peaks,
    median_over_processes,
    spread_phases,
)
from dpprof.results.analysis.tables.axes import RUN_KEY
from dpprof.results.figures.bars import bracket, note, over_baseline, share_legend, stack_panels
from dpprof.results.figures.panels import split
from dpprof.results.figures.style import (
    COMPONENT_COLOURS,
    OP_KIND_COLOURS,
    PHASE_COLOURS,
    NothingToDrawError,
    tell,
)

MISSING = "no run of the instrument kernels succeeded"

_FEW_METHODS = 6
_MIB = 2**20
_GIB = 2**30
_MEMORY = "target's memory"
_HERE = "live memory at the peak (MiB)"
_OWNERS = {name: name for name in COMPONENT_COLOURS}


def draw_breakdown(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Live memory by owner at the peak of a step; numbers are ratios to standard.

    It is recorded, or predicted where nothing was. The tick is the allocator's peak, measured by
    another process.
    """
    peaks = compose_peaks(tables)
    missing = "no run of the instruments memory or estimate succeeded without a target"
    here = peaks[peaks["target"].isna()]
    panels = split(here, missing, most=_most_panels(here))
    figure, drawn = stack_panels(panels, _OWNERS, COMPONENT_COLOURS, _MIB, _HERE)
    for axis, rows, sizes in drawn:
        measured = rows["allocator_peak_bytes"].astype(float) / _MIB
        axis.plot(measured, range(len(rows)), "|", color="black", markersize=9, markeredgewidth=1.5)
        note(axis, pd.concat([sizes, measured], axis=1).max(axis=1), over_baseline(sizes))
    share_legend(figure, COMPONENT_COLOURS)
    tell(figure, _say_largest(drawn, _OWNERS, "holds most memory at the peak"))
    return figure


def draw_predicted(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Predicted live memory by owner at the peak on a target; numbers are ratios to standard.

    The dashed line is the memory that a training can allocate there. The allocator reserves more:
    see Predicted peaks.
    """
    peaks = compose_peaks(tables)
    missing = "no run of the instrument estimate succeeded for a target"
    there = peaks[peaks["target"].notna()]
    panels = split(there, missing, most=_most_panels(there))
    figure, drawn = stack_panels(panels, _OWNERS, COMPONENT_COLOURS, _GIB, "predicted peak (GiB)")
    for axis, rows, sizes in drawn:
        note(axis, sizes, over_baseline(sizes))
        memory = rows["target_memory_bytes"].astype(float).max() / _GIB
        if pd.notna(memory):
            axis.axvline(memory, color="black", linestyle="--", linewidth=1, label=_MEMORY)
            axis.set_xlim(0, max(axis.get_xlim()[1], memory * 1.05))
    share_legend(figure, [*COMPONENT_COLOURS, _MEMORY])
    tell(figure, _say_largest(drawn, _OWNERS, "needs most memory"))
    return figure


def draw_phases(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a step by phase; numbers are ratios of the sum to standard's.

    Parts are medians over steps and processes; error bars span the sums of processes, which wait
    for the device at the end of each phase.
    """
    measured = tables["phases"]
    spread = spread_phases(measured)
    experiments = tables["experiments"].merge(
        spread.join(_reach(measured)), left_on="experiment_id", right_index=True
    )
    panels = split(
        experiments, "no run of the instrument phases succeeded", most=_most_panels(experiments)
    )
    phases = {phase: phase for phase in PHASE_COLOURS if phase in experiments}
    figure, drawn = stack_panels(panels, phases, PHASE_COLOURS, 1e-3, "time of a step (ms)")
    for axis, rows, total in drawn:
        low, high = rows["least_s"] * 1e3, rows["most_s"] * 1e3
        bracket(axis, low, high)
        note(axis, pd.concat([total, high], axis=1).max(axis=1), over_baseline(total))
    share_legend(figure, PHASE_COLOURS)
    tell(figure, _say_largest(drawn, phases, "takes longest"))
    return figure


def _reach(phases: pd.DataFrame) -> pd.DataFrame:
    """Return, per experiment, the smallest and the largest sum of a process's phases."""
    sums = phases.groupby(RUN_KEY)["median_s"].sum().groupby("experiment_id")
    reach = pd.DataFrame({"least_s": sums.min(), "most_s": sums.max()})
    return reach[sums.count() > 1]


def draw_op_kinds(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a traced step by op kind (kind of operator); numbers are ratios to standard.

    Norm computes per-sample norms, clip is the rest of the phase clip, and optimizer is all of the
    phase step. Idle is time without kernels. All times include the tracer's cost.
    """
    if tables["kernels"].empty:
        raise NothingToDrawError(MISSING)
    traces = add_op_kinds(tables["traces"], tables["kernels"])
    parts = {name: f"{name}_s" for name in OP_KIND_COLOURS if f"{name}_s" in traces}
    panels = split(median_over_processes(traces), MISSING, most=_most_panels(traces))
    label = "time of a traced step (ms)"
    figure, drawn = stack_panels(panels, parts, OP_KIND_COLOURS, 1e-3, label)
    for axis, _, total in drawn:
        note(axis, total, over_baseline(total))
    share_legend(figure, OP_KIND_COLOURS)
    tell(figure, _say_largest(drawn, parts, "takes longest"))
    return figure


def _most_panels(rows: pd.DataFrame) -> int:
    """Return how many panels fit half a page: fewer where each has the bars of many methods."""
    return 4 if rows["method"].nunique() <= _FEW_METHODS else 2


def _say_largest(
    drawn: Sequence[tuple[Axes, pd.DataFrame, "pd.Series[float]"]],
    parts: Mapping[str, str],
    does: str,
) -> str:
    """Say which bar of the last panel is the longest, and what its largest part is."""
    _, rows, lengths = drawn[-1]
    row = int(lengths.to_numpy().argmax())
    sizes = rows[list(parts.values())].iloc[row].astype(float)
    part = list(parts)[int(sizes.to_numpy().argmax())].replace("_", " ")
    method, ratio = rows.index[row], over_baseline(lengths).iloc[row].removesuffix("x")
    over = f", {ratio} times standard" if ratio and ratio != "1.00" else ""
    return f"{method} {does}{over}: {100 * sizes.max() / sizes.sum():.0f} % is {part}."
