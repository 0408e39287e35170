"""The sections on what a step computes, moves and exchanges, and what measuring it adds."""

from typing import Any

import pandas as pd

from dpprof.results.report.rendering.document import Blocks, Paragraph
from dpprof.results.report.sections.tables import (
    Column,
    amount,
    tabulate,
    tabulate_experiments,
    text,
    three_digits,
    whole,
    words,
)
from dpprof.results.report.wording import number, significant

_MIB = 2**20
_GIB = 2**30
_COSTS = {
    "model GFLOP": ("model_flops", 1e9),
    "executed": ("executed_flops", 1e9),
    "multiplier": ("dp_flop_multiplier", 1.0),
    "GiB read": ("bytes_read", _GIB),
    "written": ("bytes_written", _GIB),
    "FLOP/byte": ("arithmetic_intensity", 1.0),
    "MFU (%)": ("mfu", 0.01),
    "HFU (%)": ("hfu", 0.01),
    "least step (ms)": ("roofline_step_s", 1e-3),
}


def costs(costs: pd.DataFrame) -> Blocks:
    """Return what a step computes and moves, here and on targets; nothing without records."""
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
            heading: three_digits(name, unit)
            for heading, (name, unit) in _COSTS.items()
            if rows[name].notna().any()
        }
        tables += tabulate_experiments(said, columns, rows, "costs.csv")
    return tables + _tell_peaks(costs)


def _tell_peaks(costs: pd.DataFrame) -> Blocks:
    """Return the peaks that MFU and HFU are shares of, or why there are none."""
    used = costs[costs["hfu"].notna()]
    said = [
        f"The peak of {dtype} is {significant(peak, 1e12)} TFLOP/s: {source}."
        for dtype, peak, source in sorted(
            set(used[["dtype", "peak_flops_per_s", "peak_source"]].itertuples(index=False))
        )
    ]
    missing = costs[costs["mfu"].isna() & costs["target"].isna()]
    said += [
        f"MFU is unknown where {why}."
        for why in sorted(set(missing["utilisation_reason"].dropna()))
    ]
    return [Paragraph(text=" ".join(said))] if said else []


def exchange(experiments: pd.DataFrame) -> Blocks:
    """Return what a rank sends in a step, by experiment; nothing where no ranks exchange any."""
    columns = {
        "sent (MiB)": amount("sent_bytes", _MIB, 2),
        "beyond standard (MiB)": amount("sent_beyond_bytes", _MIB, 2),
    }
    caption = (
        "Bytes that a rank sends in a step, and receives as well, counted from the collectives "
        "that ran, each as a ring sends it; and how much of it standard, all else equal, does not."
    )
    sent = experiments[experiments["sent_bytes"].notna()]
    return tabulate_experiments(caption, columns, sent, "communication.csv")


def instrument_overhead(table: pd.DataFrame) -> Blocks:
    """Return the overhead of each instrument; nothing where no experiment has one besides clean."""
    summed = table.groupby("instrument").agg(
        experiments=("experiment_id", "count"),
        **{
            f"{figure}_{name}": (figure, name)
            for figure in ("step_ratio", "rss_ratio", "allocated_ratio")
            for name in ("median", "min", "max")
        },
    )
    columns = {"instrument": text("instrument"), "experiments": whole("experiments")}
    for heading, figure in (
        ("step", "step_ratio"),
        ("peak RSS", "rss_ratio"),
        ("peak allocated", "allocated_ratio"),
    ):
        if summed[f"{figure}_median"].notna().any():
            columns[heading] = _ratio(figure)
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
        middle = number(row[f"{figure}_median"], digits=2)
        if row["experiments"] == 1 or middle == "-":
            return middle
        low, high = (number(row[f"{figure}_{end}"], digits=2) for end in ("min", "max"))
        return f"{middle} ({low} to {high})"

    return words(write)


def host_io(runs: pd.DataFrame) -> Blocks:
    """Return the bytes that processes read and wrote in timed steps, and the energy of a step."""
    told: Blocks = []
    counted = runs.dropna(subset=["host_read_bytes", "host_written_bytes"])
    if len(counted):
        steps = counted["timed_steps"]
        read = (counted["host_read_bytes"] / steps).max()
        written = (counted["host_written_bytes"] / steps).max()
        told.append(
            Paragraph(
                text="Step times include no file access: the batch stays on the device. In the "
                f"timed steps no process read more than {read:,.0f} bytes per step or wrote more "
                f"than {written:,.0f}, including the page cache."
            )
        )
    joules = runs.dropna(subset=["joules_per_step"])
    columns = {"J per step": three_digits("joules_per_step")}
    caption = "Energy of a step from the driver's counter, including idle power."
    return told + tabulate_experiments(caption, columns, joules, "runs.csv")
