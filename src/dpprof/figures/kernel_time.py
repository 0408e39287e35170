"""Which kernels take the time of a step, and when does nothing run?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.frames import RUN_KEY
from dpprof.figures.bars import height_of, note, over_baseline, share_legend, stack
from dpprof.figures.panels import split
from dpprof.figures.style import BOUND_COLOURS, OP_KIND_COLOURS, NothingToDrawError

MISSING = "no run of the instrument kernels succeeded"


def draw_op_kinds(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a step by kind of operator; the ratio is to standard.

    Norm is the search for norms of per-sample gradients, einsum what is contracted otherwise,
    clip what else the phase clip does, optimizer all of the phase step. Idle is when none ran:
    on a CPU that is Python, autograd and dispatch. The tracer's own cost is in all of it.

    Args:
        tables: Of these, ``kernels`` and ``traces``.
    """
    if tables["kernels"].empty:
        raise NothingToDrawError(MISSING)
    kernels = tables["kernels"].groupby([*RUN_KEY, "op_kind"])["seconds"].sum()
    by_op_kind = kernels.unstack()  # noqa: PD010 (there is nothing to aggregate)
    names = {op_kind: f"{op_kind}_s" for op_kind in by_op_kind}
    traces = tables["traces"].merge(
        by_op_kind.rename(columns=names), left_on=RUN_KEY, right_index=True
    )
    parts = {name: f"{name}_s" for name in OP_KIND_COLOURS if name in {*names, "idle"}}
    return _draw(traces, OP_KIND_COLOURS, parts)


def draw_bound(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """What binds the time of a step: computing, moving bytes, or nothing that runs.

    The time of a phase's kernels of one kind counts as bound by what would take longer at the
    ceilings measured on the device, its FLOPs or its bytes, though it may be far from either.
    Bytes are those that operators must move, caches or not. The ratio is to standard.

    Args:
        tables: Of these, ``traces``.
    """
    parts = {name: f"{name.replace(' ', '_')}_s" for name in BOUND_COLOURS}
    return _draw(tables["traces"], BOUND_COLOURS, parts)


def _draw(traces: pd.DataFrame, colours: Mapping[str, str], parts: Mapping[str, str]) -> Figure:
    """Stack parts of a step, medians over processes; ``parts`` has the column of each."""
    columns = list(parts.values())
    over_processes = traces.groupby("experiment_id")[columns].median()
    facts = traces.drop(columns=columns).drop_duplicates("experiment_id")
    told = facts.merge(over_processes, left_on="experiment_id", right_index=True)
    panels = split(told, MISSING, most=8)
    figure, axes = panels.lay_out(row_inches=height_of(panels))
    for axis, panel in zip(axes, panels.shown, strict=True):
        shown = panel.by_method[columns].set_axis(list(parts), axis=1) * 1e3
        stack(axis, shown, colours)
        total = shown.sum(axis=1)
        note(axis, total, over_baseline(total))
        axis.set_xlabel("time of a traced step (ms)")
    share_legend(figure, axes, colours)
    return figure
