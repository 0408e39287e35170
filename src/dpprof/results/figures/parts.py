"""What do the memory at the peak and the time of a step consist of, and does it fit?"""

from collections.abc import Mapping

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
from dpprof.results.figures import bars, style
from dpprof.results.figures.panels import split

_OWNERS = {name: name for name in style.COMPONENT_COLOURS}
_FEW_METHODS = 6
_MIB, _GIB = 2**20, 2**30
_MEMORY = "target's memory"

Drawn = list[tuple[Axes, pd.DataFrame, "pd.Series[float]"]]  # panels, rows, lengths of bars


def draw_breakdown(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Live memory by owner at the peak of a step; numbers are ratios to standard.

    It is recorded, or predicted where nothing was. The tick is the allocator's peak, measured by
    another process.
    """
    peaks = compose_peaks(tables)
    missing = "no run of the instruments memory or estimate succeeded without a target"
    scale = (_MIB, "live memory at the peak (MiB)")
    here = peaks[peaks["target"].isna()]
    figure, drawn = _stack(here, missing, _OWNERS, style.COMPONENT_COLOURS, scale)
    for axis, rows, sizes in drawn:
        measured = rows["allocator_peak_bytes"].astype(float) / _MIB
        axis.plot(measured, range(len(rows)), "|", color="black", markersize=9, markeredgewidth=1.5)
        _note_ratios(axis, pd.concat([sizes, measured], axis=1).max(axis=1), sizes)
    bars.share_legend(figure, style.COMPONENT_COLOURS)
    style.tell(figure, _say_largest(drawn, _OWNERS, "holds most memory at the peak"))
    return figure


def draw_predicted(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Predicted live memory by owner at the peak on a target; numbers are ratios to standard.

    The dashed line is the memory that a training can allocate there. The allocator reserves more:
    see Predicted peaks.
    """
    peaks = compose_peaks(tables)
    missing = "no run of the instrument estimate succeeded for a target"
    scale = (_GIB, "predicted peak (GiB)")
    there = peaks[peaks["target"].notna()]
    figure, drawn = _stack(there, missing, _OWNERS, style.COMPONENT_COLOURS, scale)
    for axis, rows, sizes in drawn:
        _note_ratios(axis, sizes, sizes)
        memory = rows["target_memory_bytes"].astype(float).max() / _GIB
        if pd.notna(memory):
            axis.axvline(memory, color="black", linestyle="--", linewidth=1, label=_MEMORY)
            axis.set_xlim(0, max(axis.get_xlim()[1], memory * 1.05))
    bars.share_legend(figure, [*style.COMPONENT_COLOURS, _MEMORY])
    style.tell(figure, _say_largest(drawn, _OWNERS, "needs most memory"))
    return figure


def draw_phases(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a step by phase; numbers are ratios of the sum to standard's.

    Parts are medians over steps and processes; error bars span the sums of processes, which wait
    for the device at the end of each phase.
    """
    measured = tables["phases"]
    sums = measured.groupby(RUN_KEY)["median_s"].sum().groupby("experiment_id")
    ends = pd.DataFrame({"least_s": sums.min(), "most_s": sums.max()})[sums.count() > 1]
    times = spread_phases(measured).join(ends)
    experiments = tables["experiments"].merge(times, left_on="experiment_id", right_index=True)
    missing, scale = "no run of the instrument phases succeeded", (1e-3, "time of a step (ms)")
    phases = {phase: phase for phase in style.PHASE_COLOURS if phase in experiments}
    figure, drawn = _stack(experiments, missing, phases, style.PHASE_COLOURS, scale)
    for axis, rows, total in drawn:
        low, high = rows["least_s"] * 1e3, rows["most_s"] * 1e3
        bars.bracket(axis, low, high)
        _note_ratios(axis, pd.concat([total, high], axis=1).max(axis=1), total)
    bars.share_legend(figure, style.PHASE_COLOURS)
    style.tell(figure, _say_largest(drawn, phases, "takes longest"))
    return figure


def draw_op_kinds(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a traced step by op kind (kind of operator); numbers are ratios to standard.

    Norm computes per-sample norms, clip is the rest of the phase clip, and optimizer is all of the
    phase step. Idle is time without kernels. All times include the tracer's cost.
    """
    missing = "no run of the instrument kernels succeeded"
    scale = (1e-3, "time of a traced step (ms)")
    if tables["kernels"].empty:
        raise style.NothingToDrawError(missing)
    traces = median_over_processes(add_op_kinds(tables["traces"], tables["kernels"]))
    parts = {name: f"{name}_s" for name in style.OP_KIND_COLOURS if f"{name}_s" in traces}
    figure, drawn = _stack(traces, missing, parts, style.OP_KIND_COLOURS, scale)
    for axis, _, total in drawn:
        _note_ratios(axis, total, total)
    bars.share_legend(figure, style.OP_KIND_COLOURS)
    style.tell(figure, _say_largest(drawn, parts, "takes longest"))
    return figure


def _stack(
    rows: pd.DataFrame,
    missing: str,
    parts: Mapping[str, str],
    colours: Mapping[str, str],
    scale: tuple[float, str],
) -> tuple[Figure, Drawn]:
    """Draw stacked bars in panels that fit half a page, sorted by their lengths.

    ``parts`` are the columns, by name; ``scale`` is a unit and a label; ``missing`` is the message
    where there are no rows.
    """
    panels = split(rows, missing, most=4 if rows["method"].nunique() <= _FEW_METHODS else 2)
    height = bars.height_of(max(len(panel.rows) for panel in panels.shown))
    figure, axes = panels.lay_out(row_inches=height, title_at="right")
    drawn: Drawn = []
    for axis, panel in zip(axes, panels.shown, strict=True):
        ordered = panel.sorted_by(panel.rows[list(parts.values())].sum(axis=1))
        lengths = ordered[list(parts.values())].set_axis(list(parts), axis=1) / scale[0]
        bars.stack(axis, lengths, colours)
        axis.set_xlabel(scale[1])
        drawn.append((axis, ordered, lengths.sum(axis=1)))
    return figure, drawn


def _note_ratios(axis: Axes, ends: "pd.Series[float]", lengths: "pd.Series[float]") -> None:
    for row, (end, ratio) in enumerate(zip(ends, bars.over_baseline(lengths), strict=True)):
        axis.annotate(
            ratio,
            (end, row),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axis.set_xlim(0, max(ends) * 1.3)


def _say_largest(drawn: Drawn, parts: Mapping[str, str], does: str) -> str:
    _, rows, lengths = drawn[-1]
    row = int(lengths.to_numpy().argmax())
    sizes = rows[list(parts.values())].iloc[row].astype(float)
    part = list(parts)[int(sizes.to_numpy().argmax())].replace("_", " ")
    method, ratio = rows.index[row], bars.over_baseline(lengths).iloc[row].removesuffix("x")
    over = f", {ratio} times standard" if ratio and ratio != "1.00" else ""
    return f"{method} {does}{over}: {100 * sizes.max() / sizes.sum():.0f} % is {part}."
