"""The sections on what a step computes, moves and exchanges, its kernels, and measuring's cost."""

from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import OP_KINDS
from dpprof.results.analysis.selection import add_op_kinds, median_over_processes
from dpprof.results.report.rendering.document import Blocks
from dpprof.results.report.sections import column
from dpprof.results.report.sections.column import Column
from dpprof.results.report.sections.tables import paragraph, tabulate, tabulate_experiments
from dpprof.results.report.wording import GIB, MIB, MS, number, percent, significant

_COSTS = {
    "model GFLOP": ("model_flops", 1e9),
    "executed": ("executed_flops", 1e9),
    "multiplier": ("dp_flop_multiplier", 1.0),
    "GiB read": ("bytes_read", GIB),
    "written": ("bytes_written", GIB),
    "FLOP/byte": ("arithmetic_intensity", 1.0),
    "MFU (%)": ("mfu", 0.01),
    "HFU (%)": ("hfu", 0.01),
    "least step (ms)": ("roofline_step_s", MS),
}
_MOST_OP_KINDS = 8
"""More columns do not fit a page."""


def costs(costs: pd.DataFrame) -> Blocks:
    """Return what a step computes and moves, here and on targets; nothing without records.

    Below are the peaks that MFU and HFU are shares of, or why there are none.
    """
    caption = (
        "What a step computes and moves. FLOPs count matrix products and attention. Model FLOPs "
        "are what the non-private step needs; the multiplier is executed FLOPs over model FLOPs. "
        "Bytes count each read and write of an operator once. MFU and HFU are model and executed "
        "FLOPs over what the device could compute in the measured step. The least step time is a "
        "bound from its data sheet. Unknown figures have no column."
    )
    elsewhere = costs["target"].notna()
    told = {caption: costs[~elsewhere], "The same for targets, predicted.": costs[elsewhere]}
    tables: Blocks = []
    for said, rows in told.items():
        columns = {
            heading: column.three_digits(name, unit)
            for heading, (name, unit) in _COSTS.items()
            if rows[name].notna().any()
        }
        tables += tabulate_experiments(said, columns, rows, "costs.csv")
    used = costs.loc[costs["hfu"].notna(), ["dtype", "peak_flops_per_s", "peak_source"]]
    peaks = [
        f"The peak of {dtype} is {significant(peak, 1e12)} TFLOP/s: {source}."
        for dtype, peak, source in sorted(set(used.itertuples(index=False)))
    ]
    unknown = costs.loc[costs["mfu"].isna() & ~elsewhere, "utilisation_reason"].dropna()
    reasons = [f"MFU is unknown where {why}." for why in sorted(set(unknown))]
    return tables + paragraph(*peaks, *reasons)


def exchange(experiments: pd.DataFrame) -> Blocks:
    """Return what a rank sends in a step, by experiment; nothing where no ranks exchange any."""
    columns = {
        "sent (MiB)": column.amount("sent_bytes", MIB, 2),
        "beyond standard (MiB)": column.amount("sent_beyond_bytes", MIB, 2),
    }
    caption = (
        "Bytes that a rank sends in a step, and receives as well, counted from the collectives "
        "that ran, each as a ring sends it; and how much of it standard, all else equal, does not."
    )
    sent = experiments[experiments["sent_bytes"].notna()]
    return tabulate_experiments(caption, columns, sent, "communication.csv")


def instrument_overhead(table: pd.DataFrame) -> Blocks:
    """Return the overhead of each instrument; nothing where no experiment has one besides clean."""
    ratios = {"step": "step_ratio", "peak RSS": "rss_ratio", "peak allocated": "allocated_ratio"}
    summed = table.groupby("instrument").agg(
        experiments=("experiment_id", "count"),
        **{
            f"{figure}_{name}": (figure, name)
            for figure in ratios.values()
            for name in ("median", "min", "max")
        },
    )
    columns = {"instrument": column.text("instrument"), "experiments": column.whole("experiments")}
    columns |= {
        heading: _ratio(figure)
        for heading, figure in ratios.items()
        if summed[f"{figure}_median"].notna().any()
    }
    caption = (
        "Overhead of measuring: ratios of a process with the instrument to one under clean, for "
        "the same experiments; the median and, in brackets, the range. Clean numbers come from "
        "processes without any instrument. Phases waits for the device at the end of each phase, "
        "memory records every operator, and kernels runs torch.profiler. Resident memory includes "
        "what an instrument records, and differs between equal processes too."
    )
    return tabulate(caption, columns, summed.reset_index(), "instrument_overhead.csv")


def _ratio(figure: str) -> Column:
    def write(row: Any) -> str:
        middle, low, high = (
            number(row[f"{figure}_{name}"], digits=2) for name in ("median", "min", "max")
        )
        is_alone = row["experiments"] == 1 or middle == "-"
        return middle if is_alone else f"{middle} ({low} to {high})"

    return column.words(write)


def host_io(runs: pd.DataFrame) -> Blocks:
    """Return the bytes that processes read and wrote in timed steps, and the energy of a step."""
    told: Blocks = []
    counted = runs.dropna(subset=["host_read_bytes", "host_written_bytes"])
    if len(counted):
        read, written = (
            (counted[name] / counted["timed_steps"]).max()
            for name in ("host_read_bytes", "host_written_bytes")
        )
        told = paragraph(
            "Step times include no file access: the batch stays on the device. In the timed steps "
            f"no process read more than {read:,.0f} bytes per step or wrote more than "
            f"{written:,.0f}, including the page cache."
        )
    joules = runs.dropna(subset=["joules_per_step"])
    columns = {"J per step": column.three_digits("joules_per_step")}
    caption = "Energy of a step from the driver's counter, including idle power."
    return told + tabulate_experiments(caption, columns, joules, "runs.csv")


def by_op_kind(kernels: pd.DataFrame, traces: pd.DataFrame) -> Blocks:
    """Return the time of a step by op kind, and its files; nothing where no run was traced."""
    if traces.empty:
        return []
    rows = median_over_processes(add_op_kinds(traces, kernels))
    there = sorted(set(kernels["op_kind"]))
    most = rows[[f"{name}_s" for name in there]].max().nlargest(_MOST_OP_KINDS)
    shown = [str(name) for name in OP_KINDS if f"{name}_s" in most]
    left = [name for name in there if name not in shown]
    rows = rows.assign(rest_s=rows[[f"{name}_s" for name in left]].sum(axis=1))
    columns = {name: column.amount(f"{name}_s", MS) for name in shown}
    columns |= {"rest": column.amount("rest_s", MS)} if left else {}
    columns |= {"idle": column.amount("idle_s", MS), "step": column.amount("step_s", MS)}
    columns["other"] = column.share("other_share", 1)
    caption = (
        "Milliseconds of a traced step by op kind (kind of operator); idle is time without "
        "kernels. The operator that launched a kernel decides its op kind: norm computes the norms "
        "of per-sample gradients, einsum is any other contraction by einsum, optimizer is all of "
        "the phase step, clip is the rest of the phase clip. Other is the share of the kernels' "
        "time whose op kind is unknown."
    )
    if rows["waiting_s"].notna().any():
        columns["waiting"] = column.amount("waiting_s", MS)
        caption += " Waiting is the part of idle in which nothing was launched."
    caption += f" Rest sums {', '.join(left)}." if left else ""
    blocks = tabulate_experiments(caption, columns, rows, "kernels.csv and traces.csv")
    kept = traces.dropna(subset=["trace"])
    if kept.empty:
        return blocks
    return blocks + paragraph(
        f"The traces, of {kept['trace_bytes'].max() / MIB:.1f} MiB at most, are in results/traces. "
        "Open one in Perfetto (ui.perfetto.dev), or compare all with tensorboard --logdir "
        "results/traces."
    )


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
        "of peak FLOP/s": column.share("of_peak"),
        "of bandwidth": column.share("of_bandwidth"),
        "GB/s": column.three_digits("memory_bytes_per_s", 1e9),
    }
    caption = (
        "Shares of a traced step that are compute bound, memory bound and idle. Kernels of one op "
        "kind in a phase are compute bound if their FLOPs would take longer than their bytes at "
        "the device's measured ceilings, else memory bound. Of peak FLOP/s is the speed of "
        "compute-bound kernels, of bandwidth and GB/s that of memory-bound ones. Caches can lift "
        "these above the memory's bandwidth."
    )
    return tabulate_experiments(caption, columns, rows, "kernels.csv")


def _share_of_step(name: str) -> Column:
    return Column(lambda row: percent(row[name] / row["step_s"]))


def _rates(kernels: pd.DataFrame) -> pd.DataFrame:
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


_CEILINGS = {
    "flops_per_s": ("{} products", "GFLOP/s", 1e9),
    "bytes_per_s": ("copy bandwidth", "GB/s", 1e9),
    "launch_s": ("launch", "µs", 1e-6),
}
"""The name, the unit and its size of each figure."""


def ceilings(table: pd.DataFrame) -> Blocks:
    """Return the ceilings of the devices; nothing where none were measured."""
    columns = {
        "device": column.text("device"),
        "figure": column.words(lambda row: _CEILINGS[row["figure"]][0].format(row["dtype"])),
        "measured": _ceiling("measured"),
        "data sheet": _ceiling("datasheet"),
        "unit": column.words(lambda row: _CEILINGS[row["figure"]][1]),
    }
    caption = (
        "The measured ceilings of each device: the fastest matrix product of any size for each "
        "dtype, the fastest copy (bytes read and written), and the time of an operator on one "
        "element (launch)."
    )
    return tabulate(caption, columns, table, "ceilings.csv")


def _ceiling(name: str) -> Column:
    return Column(lambda row: significant(row[name], _CEILINGS[row["figure"]][2]))
