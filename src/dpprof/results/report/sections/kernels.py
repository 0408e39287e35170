"""The sections on traces: kernels, what binds them, and the device's ceilings."""

import pandas as pd

from dpprof.experiments.records.terms import OP_KINDS
from dpprof.results.analysis.selection import add_op_kinds, median_over_processes
from dpprof.results.report.rendering.document import Blocks, Paragraph
from dpprof.results.report.sections.tables import (
    Column,
    amount,
    share,
    tabulate,
    tabulate_experiments,
    text,
    three_digits,
    words,
)
from dpprof.results.report.wording import percent, significant

_MS = 1e-3
_MIB = 2**20
_MOST_OP_KINDS = 8
"""More columns do not fit a page."""


def by_op_kind(kernels: pd.DataFrame, traces: pd.DataFrame) -> Blocks:
    """Return the time of a step by op kind; nothing where no run was traced."""
    if traces.empty:
        return []
    rows = median_over_processes(add_op_kinds(traces, kernels))
    there = sorted(set(kernels["op_kind"]))
    most = rows[[f"{name}_s" for name in there]].max().nlargest(_MOST_OP_KINDS)
    shown = [str(name) for name in OP_KINDS if f"{name}_s" in most]
    left = [name for name in there if name not in shown]
    rows = rows.assign(rest_s=rows[[f"{name}_s" for name in left]].sum(axis=1))
    columns = {name: amount(f"{name}_s", _MS) for name in shown}
    columns |= {"rest": amount("rest_s", _MS)} if left else {}
    columns |= {"idle": amount("idle_s", _MS), "step": amount("step_s", _MS)}
    columns["other"] = share("other_share", 1)
    if rows["waiting_s"].notna().any():
        columns["waiting"] = amount("waiting_s", _MS)
    caption = (
        "Milliseconds of a traced step by op kind (kind of operator); idle is time without "
        "kernels. The operator that launched a kernel decides its op kind: norm computes the norms "
        "of per-sample gradients, einsum is any other contraction by einsum, optimizer is all of "
        "the phase step, clip is the rest of the phase clip. Other is the share of the kernels' "
        "time whose op kind is unknown."
        + (" Waiting is the part of idle in which nothing was launched." * ("waiting" in columns))
        + (f" Rest sums {', '.join(left)}." if left else "")
    )
    source = "kernels.csv and traces.csv"
    return tabulate_experiments(caption, columns, rows, source) + _tell_files(traces)


def _tell_files(traces: pd.DataFrame) -> Blocks:
    kept = traces.dropna(subset=["trace"])
    if kept.empty:
        return []
    size = f"{kept['trace_bytes'].max() / _MIB:.1f} MiB"
    return [
        Paragraph(
            text=f"The traces, of {size} at most, are in results/traces. Open one in Perfetto "
            "(ui.perfetto.dev), or compare all with tensorboard --logdir results/traces."
        )
    ]


def bound(traces: pd.DataFrame, kernels: pd.DataFrame) -> Blocks:
    """Return what binds a step, and how fast bytes move; nothing where ceilings are unknown."""
    rows = median_over_processes(traces)
    rows = rows[rows["compute_bound_s"] + rows["memory_bound_s"] > 0]
    if rows.empty:
        return []
    rows = rows.merge(_rates(kernels), left_on="experiment_id", right_index=True)
    columns = {
        "compute bound": _share_of_step("compute_bound_s"),
        "memory bound": _share_of_step("memory_bound_s"),
        "idle": _share_of_step("idle_s"),
        "of peak FLOP/s": share("of_peak"),
        "of bandwidth": share("of_bandwidth"),
        "GB/s": three_digits("memory_bytes_per_s", 1e9),
    }
    caption = (
        "Shares of a traced step that are compute bound, memory bound and idle. Kernels of one op "
        "kind in a phase are compute bound if their FLOPs would take longer than their bytes at "
        "the device's measured ceilings, else memory bound. Of peak FLOP/s is the speed of "
        "compute-bound kernels, of bandwidth and GB/s that of memory-bound ones. Caches can lift "
        "these above the memory's bandwidth."
    )
    return tabulate_experiments(caption, columns, rows, "kernels.csv")


def _rates(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return the speed of compute-bound and of memory-bound kernels, by experiment."""
    work = kernels.assign(moved=kernels["read_bytes"] + kernels["written_bytes"])
    sums = work.groupby(["bound", "experiment_id"])[["flops", "moved", "seconds"]].sum()
    per_s = sums[["flops", "moved"]].div(sums["seconds"], axis=0)
    roof = kernels.groupby("experiment_id")[["ceiling_flops_per_s", "ceiling_bytes_per_s"]].first()
    bound = per_s.index.get_level_values("bound")
    computed, carried = (per_s[bound == kind].droplevel("bound") for kind in ("compute", "memory"))
    return roof.assign(
        of_peak=computed["flops"] / roof["ceiling_flops_per_s"],
        memory_bytes_per_s=carried["moved"],
        of_bandwidth=carried["moved"] / roof["ceiling_bytes_per_s"],
    )[["of_peak", "memory_bytes_per_s", "of_bandwidth"]]


def _share_of_step(name: str) -> Column:
    return Column(lambda row: percent(row[name] / row["step_s"]))


_CEILINGS = {
    "flops_per_s": ("{} products", "GFLOP/s", 1e9),
    "bytes_per_s": ("copy bandwidth", "GB/s", 1e9),
    "launch_s": ("launch", "µs", 1e-6),
}
"""The name, the unit and its size of each figure."""


def ceilings(table: pd.DataFrame) -> Blocks:
    """Return the ceilings of the devices; nothing where none were measured."""
    columns = {
        "device": text("device"),
        "figure": words(lambda row: _CEILINGS[row["figure"]][0].format(row["dtype"])),
        "measured": Column(lambda row: significant(row["measured"], _CEILINGS[row["figure"]][2])),
        "data sheet": Column(
            lambda row: significant(row["datasheet"], _CEILINGS[row["figure"]][2])
        ),
        "unit": words(lambda row: _CEILINGS[row["figure"]][1]),
    }
    caption = (
        "The measured ceilings of each device: the fastest matrix product of any size for each "
        "dtype, the fastest copy (bytes read and written), and the time of an operator on one "
        "element (launch)."
    )
    return tabulate(caption, columns, table, "ceilings.csv")
