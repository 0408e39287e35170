"""The sections on memory: owners at the peak, predictions, what fits, and reconciliation."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import COMPONENTS, EVIDENCE
from dpprof.results.analysis.selection import find_fitting, needed_bytes
from dpprof.results.analysis.tables.axes import BASELINE, SETTING, count_tokens, name_speed
from dpprof.results.report.rendering.document import Blocks
from dpprof.results.report.sections.tables import (
    Column,
    amount,
    interval,
    sizes,
    speed,
    tabulate,
    tabulate_experiments,
    text,
    three_digits,
    words,
)
from dpprof.results.report.wording import (
    THIS_MACHINE,
    name_training,
    number,
    percent,
    significant,
)

_MIB = 2**20
_GIB = 2**30
_LEAST_SHARE = 0.01
"""An owner below this share of every peak has no column."""

_MOST_OWNERS = 8
"""More columns do not fit on a page."""


def owners(composition: pd.DataFrame) -> Blocks:
    """Return the owners at the peak, and what causes it; nothing where no memory was recorded."""
    rows = composition[composition["target"].isna()]
    shares = rows[list(COMPONENTS)].div(rows["peak_bytes"], axis=0).astype(float).max()
    largest = shares[shares >= _LEAST_SHARE].nlargest(_MOST_OWNERS)
    shown = [name for name in COMPONENTS if name in largest]
    rows = rows.assign(other=rows["peak_bytes"] - rows[shown].sum(axis=1))
    columns = {"peak": amount("peak_bytes", _MIB)}
    columns |= {name.replace("_", " "): amount(name, _MIB) for name in [*shown, "other"]}
    caption = (
        "MiB by owner at the peak of a steady-state step, from the instrument memory where it ran, "
        "else from estimate. Other sums up the owners below 1 % of every peak, and those beyond "
        "the eight largest."
    )
    causes = {
        "peak (MiB)": amount("peak_bytes", _MIB),
        "phase": text("phase", spaced=True),
        "operator": text("op"),
        "module": text("module"),
        "from": text("instrument"),
    }
    explained = "What causes the peak: the last operator that allocates, in its phase and module."
    return [
        *tabulate_experiments(caption, columns, rows, "owners.csv"),
        *tabulate_experiments(explained, causes, rows, "peaks.csv"),
    ]


def predictions(composition: pd.DataFrame, costs: pd.DataFrame) -> Blocks:
    """Return the predictions for targets; nothing where there are none."""
    rows = composition[composition["target"].notna()]
    if rows.empty:
        return []
    bounds = ["experiment_id", "dp_flop_multiplier", "roofline_step_s"]
    rows = rows.merge(costs[bounds], on="experiment_id")
    standard = rows["peak_bytes"].where(rows["method"] == BASELINE)
    setting = [rows[name] for name in SETTING]
    base = standard.groupby(setting, dropna=False).transform("median")
    share = needed_bytes(rows) / rows["target_memory_bytes"].astype(float)
    rows = rows.assign(ratio=rows["peak_bytes"] / base, share=share, fitting=find_fitting(rows))
    columns = {
        "peak (GiB)": amount("peak_bytes", _GIB, 2),
        "ratio": amount("ratio", digits=2),
        "reserved (GiB)": amount("reserved_bytes", _GIB, 2),
        "of the memory": words(_share),
        "FLOP multiplier": amount("dp_flop_multiplier", digits=2),
        "least step (ms)": three_digits("roofline_step_s", 1e-3),
        f"{name_speed(row for _, row in rows.iterrows())} at most": Column(_most_tokens),
    }
    caption = (
        "Predictions; nothing here ran. The peak is that of a steady-state step, its ratio is to "
        "standard with all else equal. Reserved is what PyTorch's caching allocator would take for "
        "the whole training, by simulation, and the share of the memory is that; with retries, it "
        "fits only because the allocator releases its cache. The multiplier is executed FLOPs over "
        "model FLOPs. The least step time is a bound from the target's data sheet, not a "
        "prediction: each operator at its ceiling, one after another. The tokens follow from it."
    )
    source = "peaks.csv and costs.csv"
    return tabulate_experiments(caption, columns, rows, source, first=["target"])


def _share(row: Any) -> str:
    share = row["share"]
    if share > 0 and not row["fitting"]:  # unknown where the target has no size
        return f"does not fit ({percent(share)})"
    return percent(share) + (", with retries" if share > 1 else "")


def _most_tokens(row: Any) -> str:
    least_s = row["roofline_step_s"]
    return significant(count_tokens(row) / least_s) if least_s else "-"


def tell_capacity(advice: pd.DataFrame) -> Blocks:
    """Return the largest batch of each method that fits; nothing without capacity results."""
    rows = advice.assign(target=advice["target"].fillna(THIS_MACHINE))
    columns = {
        "model": words(name_training),
        "target": text("target"),
        "dtype": text("dtype"),
        "T": sizes(),
        "method": text("method"),
        "verdict": text("verdict"),
        "largest batch": Column(_largest),
        "its peak (GiB)": amount("largest_peak_bytes", _GIB),
        "safe batch": amount("safe_batch_size", digits=0),
        **speed(rows),
        "90 % interval": interval("tokens_per_s", partial(number, digits=0)),
        "FLOPs x": amount("dp_flop_multiplier", digits=2),
    }
    budgets = rows.dropna(subset=["budget_bytes"]).groupby("target")["budget_bytes"].first()
    memory = ", ".join(f"{name} {size / _GIB:,.1f} GiB" for name, size in budgets.items())
    caption = (
        "The largest batch whose predicted peak fits in memory "
        f"({memory or 'none does'}), and a safe batch: its allocator never has to release "
        "its cache. "
        "Tokens per second are predicted at the safe batch; no difference is predicted between "
        "methods whose 90 % intervals overlap, which are called close. A + marks a search that "
        "ended before the memory was full. FLOPs x is executed FLOPs over model FLOPs."
    )
    return tabulate(caption, columns, rows, "advice.csv")


def _largest(row: Any) -> str:
    more = "+" if row["limited_by"] == "search" else ""
    return number(row["largest_batch_size"], digits=0) + more


def reconciliation(composition: pd.DataFrame, peaks: pd.DataFrame) -> Blocks:
    """Return the gaps between recorded and allocator's peaks, and how owners were identified."""
    here = composition["target"].isna() | composition["allocator_peak_bytes"].notna()
    rows = composition[here]
    estimated = peaks[peaks["instrument"] == "estimate"].groupby("experiment_id")["peak_bytes"]
    rows = rows.assign(estimated=rows["experiment_id"].map(estimated.first()))
    columns = {
        "recorded (MiB)": amount("peak_bytes", _MIB, 2),
        "from": text("instrument"),
        "allocator (MiB)": amount("allocator_peak_bytes", _MIB, 2),
        "gap": amount("gap_bytes", digits=0),
        "bound": amount("bound_bytes", digits=0),
        "reconciled": words(lambda row: _VERDICTS.get(row["valid"], "-")),
        "estimate": Column(_estimate_against_memory),
    }
    caption = (
        "Recorded peaks and the allocator's peaks from another process. The gap is the allocator's "
        "minus the recorded peak, in bytes, less what whole blocks take on CUDA; both are "
        "reconciled if it is within the bound. Estimate is the difference of the estimated from "
        "the recorded peak, in bytes."
    )
    grades = [*(f"by_{kind}_bytes" for kind in EVIDENCE), "unattributed_bytes"]
    shares = rows.assign(**{name: rows[name] / rows["peak_bytes"] for name in grades})
    evidence = {
        name.removeprefix("by_").removesuffix("_bytes"): amount(name, 0.01, 2) for name in grades
    }
    graded = (
        "How owners at the peak were identified, in percent of the peak: by an attribute that "
        "refers to the tensor, by the operator and module that created it, or only by the phase."
    )
    return [
        *tabulate_experiments(caption, columns, rows, "peaks.csv"),
        *tabulate_experiments(graded, evidence, shares, "peaks.csv"),
    ]


_VERDICTS: Mapping[Any, str] = {True: "yes", False: "no"}


def _estimate_against_memory(row: Any) -> str:
    if row["instrument"] != "memory" or pd.isna(row["estimated"]):
        return "-"
    more = int(row["estimated"] - row["peak_bytes"])
    return f"{more:+,}" if more else "equal"
