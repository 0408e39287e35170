"""Which kernels take the time of a step, and when does nothing run?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.tables.axes import RUN_KEY
from dpprof.figures.bars import note, over_baseline, share_legend, stack_panels
from dpprof.figures.panels import split
from dpprof.figures.style import BOUND_COLOURS, OP_KIND_COLOURS, NothingToDrawError

MISSING = "no run of the instrument kernels succeeded"


def draw_op_kinds(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a traced step by op kind (kind of operator); numbers are ratios to standard.

    Norm computes the norms of per-sample gradients; einsum is every other contraction by einsum.
    Clip is the rest of the phase clip, and optimizer is all of the phase step. Idle is time
    without kernels: on a CPU it is Python, autograd and dispatch. All times include the tracer's
    cost.
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
    """Compute-bound, memory-bound and idle time of a traced step; numbers are ratios to standard.

    Kernels of one op kind in a phase are compute bound if their FLOPs would take longer than
    their bytes at the measured ceilings, else memory bound. They may still be far from both
    ceilings. Bytes are what operators must read and write, whether or not a cache serves them.
    """
    parts = {name: f"{name.replace(' ', '_')}_s" for name in BOUND_COLOURS}
    return _draw(tables["traces"], BOUND_COLOURS, parts)


def _draw(traces: pd.DataFrame, colours: Mapping[str, str], parts: Mapping[str, str]) -> Figure:
    """Draw the parts of a step as stacked medians over processes; ``parts`` names their columns."""
    columns = list(parts.values())
    over_processes = traces.groupby("experiment_id")[columns].median()
    facts = traces.drop(columns=columns).drop_duplicates("experiment_id")
    known = facts.merge(over_processes, left_on="experiment_id", right_index=True)
    panels, label = split(known, MISSING, most=4), "time of a traced step (ms)"
    figure, drawn = stack_panels(panels, parts, colours, 1e-3, label)
    for axis, _, total in drawn:
        note(axis, total, over_baseline(total))
    share_legend(figure, colours)
    return figure
