"""Which owners hold memory at each moment of a step?"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.experiments.records.result import Result
from dpprof.results.analysis.selection import choose_runs
from dpprof.results.analysis.tables.axes import RUN_KEY
from dpprof.results.analysis.tables.frames import rows_of
from dpprof.results.figures import style
from dpprof.results.figures.bars import VISIBLE, share_legend
from dpprof.results.figures.panels import Panel, Panels, split

_HEADROOM = 1.4  # height of the axis over the highest peak: room for its size and the phases
_STRIP = 0.91  # the height at which the strip of phases begins, as a share of a panel's height
_LETTER = 0.009  # width of a letter of a phase's name, as a share of a page's width
_LETTER_ALONE = 0.01  # the same, as a share of the width of a figure of one panel
_SHORT = {"forward": "fwd", "backward": "bwd", "second_backward": "bwd2"}


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Memory timeline: live memory by owner over one steady-state step, one panel per method.

    The axis counts operators, not seconds. The strip on top shows the phases (fwd, bwd and bwd2:
    forward, backward and second backward). Owners below 0.5 % of the highest peak are left out.
    """
    chosen = choose_runs(tables["peaks"])
    here = chosen[chosen["target"].isna()]
    runs = chosen if here.empty else here
    settings = split(runs, "no run of the instruments memory or estimate succeeded", most=len(runs))
    focus = max(
        settings.shown,
        key=lambda panel: (
            panel.rows["method"].nunique(),
            (panel.rows["instrument"] == "memory").sum(),
            *panel.rows[["parameters_total", "batch_size", "seq_len"]].max(),
        ),
    )
    rows = focus.sorted_by(focus.rows["peak_bytes"]).groupby(level=0, sort=False).head(1)
    shown = [Panel(str(method), rows.loc[[method]]) for method in rows.index]
    columns = min(4, max(2, math.ceil(len(shown) / 2)))  # two rows, or three of four
    figure, axes = Panels(shown, 0).lay_out(columns, row_inches=1.5, sharey=True)
    highest = rows["peak_bytes"].max()
    unit = style.choose_byte_unit(highest)
    keys = rows[RUN_KEY].itertuples(index=False, name=None)
    instants = rows_of(tables, "timeline", keys).set_index(RUN_KEY)
    for position, (axis, panel) in enumerate(zip(axes, shown, strict=True)):
        run = panel.rows.iloc[0]
        step = instants.loc[[tuple(run[RUN_KEY])]]
        draw_step(axis, step, unit, highest, _LETTER * columns)
        _mark_peak(axis, step, run, unit, columns)
        axis.set_ylim(0, highest / style.BYTE_UNITS[unit] * _HEADROOM)
        axis.grid(visible=False)
        axis.locator_params(axis="y", nbins=4)
        if position % columns == 0:
            axis.set_ylabel(f"live memory ({unit})")
    figure.suptitle(f"{focus.title} ({', '.join(sorted(set(rows['instrument'])))})", fontsize=8)
    share_legend(figure, style.COMPONENT_COLOURS)
    peaks = "; ".join(
        f"in {str(phase).replace('_', ' ')} with {', '.join(methods.index)}"
        for phase, methods in rows.groupby("phase", sort=False)
    )
    style.tell(figure, f"The peak is {peaks}.")
    return figure


def draw_one(result: Result) -> Figure:
    """Live memory by owner over one steady-state step; the strip on top shows the phases.

    The horizontal axis counts operators, not seconds. Owners below 0.5 % of the peak are left out.
    """
    assert result.memory is not None
    assert result.memory.timeline is not None
    timeline = result.memory.timeline
    owned = pd.DataFrame(timeline.components)
    owned = owned.reindex(columns=[*style.COMPONENT_COLOURS], fill_value=0)
    highest = owned.sum(axis=1).max()
    unit = style.choose_byte_unit(highest)
    figure, axes = style.new_figure(row_inches=2.4)
    step = owned.assign(ops=timeline.ops, phase=timeline.phase)
    draw_step(axes[0, 0], step, unit, highest, _LETTER_ALONE)
    axes[0, 0].set_ylim(0, highest / style.BYTE_UNITS[unit] * 1.2)
    axes[0, 0].set_ylabel(f"live memory ({unit})")
    share_legend(figure, style.COMPONENT_COLOURS)
    return figure


def draw_step(axis: Axes, step: pd.DataFrame, unit: str, highest: float, letter: float) -> None:
    """Stack the visible owners of a step, under a strip of its phases.

    ``highest`` is the highest peak in bytes, ``letter`` as of ``mark_phases``.
    """
    names = [name for name in style.COMPONENT_COLOURS if (step[name] > highest * VISIBLE).any()]
    hatches: Any = [style.HATCHES.get(name) for name in names]
    axis.stackplot(
        step["ops"],
        step[names].to_numpy(float).T / style.BYTE_UNITS[unit],
        labels=[name.replace("_", " ") for name in names],
        colors=[style.COMPONENT_COLOURS[name] for name in names],
        hatch=hatches,
        edgecolor="#333333",
        linewidth=0,
    )
    entered = step[step["phase"] != step["phase"].shift()]
    length = step["ops"].max()
    ends = [*entered["ops"].iloc[1:], length]
    phases = zip(entered["phase"], entered["ops"], ends, strict=True)
    mark_phases(axis, (phase for phase in phases if phase[1] < phase[2]), length, letter)
    axis.set_xlim(0, length)
    axis.set_xlabel("operators run")


def mark_phases(
    axis: Axes, phases: Iterable[tuple[str, float, float]], length: float, letter: float
) -> None:
    """Draw a strip on top with one field per phase, and the phase's name where it fits.

    ``phases`` are names, starts and ends on an axis of this length; ``letter`` is the width of a
    letter of a name, as a share of the panel's width.
    """
    for number, (phase, start, end) in enumerate(phases):
        shade = ("#EEEEEE", "#CCCCCC")[number % 2]
        axis.axvspan(start, end, ymin=_STRIP, ymax=1, color=shade, linewidth=0)
        names = (phase.replace("_", " "), _SHORT.get(phase, phase))
        room = (end - start) / length / letter
        axis.text(
            (start + end) / 2,
            (_STRIP + 1) / 2,
            next((name for name in names if len(name) <= room), ""),
            transform=axis.get_xaxis_transform(),
            ha="center",
            va="center_baseline",
            fontsize=5.5,
        )


def _mark_peak(axis: Axes, step: pd.DataFrame, run: Any, unit: str, columns: int) -> None:
    total = step[list(style.COMPONENT_COLOURS)].sum(axis=1)
    op = step["ops"].iloc[int(total.to_numpy().argmax())]
    peak = run["peak_bytes"] / style.BYTE_UNITS[unit]
    axis.plot(op, peak, "o", color="black", markersize=2.5)
    text = f"{peak:,.1f} {unit} in {str(run['phase']).replace('_', ' ')}"
    # Above the peak, but no further out than the panel has room for the text.
    length = step["ops"].max()
    half = min(1.0, _LETTER * 6.5 / 5.5 * columns * len(text)) / 2
    axis.annotate(
        text,
        (op, peak),
        xytext=(min(max(op, half * length), (1 - half) * length), 3),
        textcoords=("data", "offset points"),
        ha="center",
        fontsize=6.5,
    )
