"""The sections on memory: owners at the peak, reconciliation, and the cost of a step."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.selection import find_fitting, needed_bytes
from dpprof.analysis.tables.axes import BASELINE, SETTING, count_tokens
from dpprof.records.terms import COMPONENTS, EVIDENCE
from dpprof.report.rendering.document import Paragraph, Table
from dpprof.report.sections.tables import (
    ORDER,
    Cell,
    Told,
    amount,
    column,
    name_experiments,
    tabulate,
    texts,
)
from dpprof.report.wording import number, percent, significant, text_of

_MIB = 2**20
_GIB = 2**30
_LEAST_SHARE = 0.01
"""An owner below this share of every peak has no column."""

_MOST_OWNERS = 8
"""More columns do not fit on a page."""


def owners(composition: pd.DataFrame) -> Told:
    """Return the owners at the peak, and what causes it; nothing where no memory was recorded."""
    rows = _here(composition)
    if rows.empty:
        return []
    shares = rows[list(COMPONENTS)].div(rows["peak_bytes"], axis=0).max()
    largest = shares[shares >= _LEAST_SHARE].nlargest(_MOST_OWNERS)
    shown = [name for name in COMPONENTS if name in largest]
    rows = rows.assign(other=rows["peak_bytes"] - rows[shown].sum(axis=1))
    naming = name_experiments(rows)
    columns = naming | {"peak": amount("peak_bytes", _MIB)}
    columns |= {name.replace("_", " "): amount(name, _MIB) for name in [*shown, "other"]}
    caption = (
        "MiB by owner at the peak of a steady-state step, from the instrument memory where it ran, "
        "else from estimate. Other sums up the owners below 1 % of every peak, and those beyond "
        "the eight largest."
    )
    causes = naming | {
        "peak (MiB)": amount("peak_bytes", _MIB),
        "phase": lambda row: text_of(row["phase"]).replace("_", " "),
        "operator": column("op"),
        "module": column("module"),
        "from": column("instrument"),
    }
    text = (*texts(naming), "phase", "operator", "module", "from")
    explained = "What causes the peak: the last operator that allocates, in its phase and module."
    return [
        tabulate(caption, columns, rows, texts(naming), "results/tables/owners.csv"),
        tabulate(explained, causes, rows, text, "results/tables/peaks.csv"),
    ]


def _here(composition: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without a target."""
    return composition[composition["target"].isna()].sort_values([*ORDER, "method"])


def predictions(composition: pd.DataFrame, costs: pd.DataFrame) -> Told:
    """Return the predictions for targets; nothing where there are none."""
    rows = composition[composition["target"].notna()]
    if rows.empty:
        return []
    known = ["experiment_id", "dp_flop_multiplier", "roofline_step_s"]
    rows = rows.merge(costs[known], on="experiment_id")
    standard = rows["peak_bytes"].where(rows["method"] == BASELINE)
    setting = [rows[name] for name in SETTING]
    base = standard.groupby(setting, dropna=False).transform("median")
    share = needed_bytes(rows) / rows["target_memory_bytes"].astype(float)
    rows = rows.assign(ratio=rows["peak_bytes"] / base, share=share, fitting=find_fitting(rows))
    rows = rows.sort_values(["target", *ORDER, "method"])
    naming = name_experiments(rows)
    columns = naming | {
        "peak (GiB)": amount("peak_bytes", _GIB, 2),
        "ratio": amount("ratio", digits=2),
        "reserved (GiB)": amount("reserved_bytes", _GIB, 2),
        "of the memory": _share,
        "FLOP multiplier": amount("dp_flop_multiplier", digits=2),
        "least step (ms)": lambda row: significant(row["roofline_step_s"], 1e-3),
        "tokens/s at most": _most_tokens,
    }
    caption = (
        "Predictions; nothing here ran. The peak is that of a steady-state step, its ratio is to "
        "standard with all else equal. Reserved is what PyTorch's caching allocator would take for "
        "the whole training, by simulation, and the share of the memory is that; with retries, it "
        "fits only because the allocator releases its cache. The multiplier is executed FLOPs over "
        "model FLOPs. The least step time is a bound from the target's data sheet, not a "
        "prediction: each operator at its ceiling, one after another. The tokens follow from it."
    )
    text = (*texts(naming), "of the memory")
    return [tabulate(caption, columns, rows, text, "results/tables/peaks.csv and costs.csv")]


def _share(row: Any) -> str:
    share = row["share"]
    if share > 0 and not row["fitting"]:  # unknown where the target has no size
        return f"does not fit ({share:.0%})"
    return f"{share:.0%}, with retries" if share > 1 else percent(share)


def _most_tokens(row: Any) -> str:
    least_s = row["roofline_step_s"]
    return significant(count_tokens(row) / least_s) if least_s else "-"


def reconciliation(composition: pd.DataFrame, peaks: pd.DataFrame) -> Told:
    """Return the gaps between recorded and allocator's peaks, and how owners were identified."""
    here = composition["target"].isna() | composition["allocator_peak_bytes"].notna()
    rows = composition[here].sort_values([*ORDER, "method"])
    if rows.empty:
        return []
    estimated = peaks[peaks["instrument"] == "estimate"].groupby("experiment_id")["peak_bytes"]
    rows = rows.assign(estimated=rows["experiment_id"].map(estimated.first()))
    naming = name_experiments(rows)
    columns = naming | {
        "recorded (MiB)": amount("peak_bytes", _MIB, 2),
        "from": column("instrument"),
        "allocator (MiB)": amount("allocator_peak_bytes", _MIB, 2),
        "gap": amount("gap_bytes", digits=0),
        "bound": amount("bound_bytes", digits=0),
        "reconciled": lambda row: _VERDICTS.get(row["valid"], "-"),
        "estimate": _estimate_against_memory,
    }
    caption = (
        "Recorded peaks and the allocator's peaks from another process. The gap is the allocator's "
        "minus the recorded peak, in bytes, less what whole blocks take on CUDA; both are "
        "reconciled if it is within the bound. Estimate is the difference of the estimated from "
        "the recorded peak, in bytes."
    )
    grades = [*(f"by_{kind}_bytes" for kind in EVIDENCE), "unattributed_bytes"]
    shares = rows.assign(**{name: rows[name] / rows["peak_bytes"] for name in grades})
    evidence = naming | {
        name.removeprefix("by_").removesuffix("_bytes"): _percent_of(name) for name in grades
    }
    graded = (
        "How owners at the peak were identified, in percent of the peak: by an attribute that "
        "refers to the tensor, by the operator and module that created it, or only by the phase."
    )
    text = (*texts(naming), "from", "reconciled")
    source = "results/tables/peaks.csv"
    return [
        tabulate(caption, columns, rows, text, source),
        tabulate(graded, evidence, shares, texts(naming), source),
    ]


_VERDICTS: Mapping[Any, str] = {True: "yes", False: "no"}


def _percent_of(name: str) -> Cell:
    return lambda row: number(row[name], 0.01, 2)


def _estimate_against_memory(row: Any) -> str:
    if row["instrument"] != "memory" or pd.isna(row["estimated"]):
        return "-"
    more = int(row["estimated"] - row["peak_bytes"])
    return f"{more:+,}" if more else "equal"


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


def costs(costs: pd.DataFrame) -> Told:
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
    tables = [_tell_costs(text, rows) for text, rows in told.items() if len(rows)]
    return [*tables, *_tell_peaks(costs)]


def _tell_peaks(costs: pd.DataFrame) -> list[Paragraph]:
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


def _tell_costs(caption: str, rows: pd.DataFrame) -> Table | Paragraph:
    rows = rows.sort_values([*ORDER, "method"])
    naming = name_experiments(rows)
    columns = naming | {
        heading: _significant(name, unit)
        for heading, (name, unit) in _COSTS.items()
        if rows[name].notna().any()
    }
    return tabulate(caption, columns, rows, texts(naming), "results/tables/costs.csv")


def _significant(name: str, unit: float) -> Cell:
    return lambda row: significant(row[name], unit)
