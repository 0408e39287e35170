"""The sections on memory: its owners, predictions, what fits at what price, reconciliation."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import COMPONENTS, EVIDENCE
from dpprof.results.analysis.selection import find_fitting, needed_bytes
from dpprof.results.analysis.tables.axes import BASELINE, SETTING, count_tokens, name_speed
from dpprof.results.report import wording
from dpprof.results.report.rendering.document import Blocks
from dpprof.results.report.sections import column
from dpprof.results.report.sections.column import Column
from dpprof.results.report.sections.tables import list_items, tabulate, tabulate_experiments

BUDGET = "What a privacy budget costs"

_LEAST_SHARE = 0.01  # an owner below this share of every peak has no column
_MOST_OWNERS = 8  # more columns do not fit on a page


def owners(composition: pd.DataFrame) -> Blocks:
    """Return the owners at the peak, and what causes it; nothing where no memory was recorded."""
    rows = composition[composition["target"].isna()]
    shares = rows[list(COMPONENTS)].div(rows["peak_bytes"], axis=0).astype(float).max()
    largest = shares[shares >= _LEAST_SHARE].nlargest(_MOST_OWNERS)
    shown = [name for name in COMPONENTS if name in largest]
    rows = rows.assign(other=rows["peak_bytes"] - rows[shown].sum(axis=1))
    columns = {"peak": column.amount("peak_bytes", wording.MIB)}
    columns |= {
        name.replace("_", " "): column.amount(name, wording.MIB) for name in [*shown, "other"]
    }
    caption = (
        "MiB by owner at the peak of a steady-state step, from the instrument memory where it ran, "
        "else from estimate. Other sums up the owners below 1 % of every peak, and those beyond "
        "the eight largest."
    )
    causes = {
        "peak (MiB)": column.amount("peak_bytes", wording.MIB),
        "phase": column.words(lambda row: wording.text_of(row["phase"]).replace("_", " ")),
        "operator": column.text("op"),
        "module": column.text("module"),
        "from": column.text("instrument"),
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
    of_memory = needed_bytes(rows) / rows["target_memory_bytes"].astype(float)
    least_s = rows["roofline_step_s"].astype(float).replace(0, math.nan)
    rows = rows.assign(
        ratio=rows["peak_bytes"] / base,
        share=of_memory,
        fitting=find_fitting(rows),
        most_tokens=rows.apply(count_tokens, axis=1) / least_s,
    )
    speed = name_speed(row for _, row in rows.iterrows())
    columns = {
        "peak (GiB)": column.amount("peak_bytes", wording.GIB, 2),
        "ratio": column.amount("ratio", digits=2),
        "reserved (GiB)": column.amount("reserved_bytes", wording.GIB, 2),
        "of the memory": column.words(_share),
        "FLOP multiplier": column.amount("dp_flop_multiplier", digits=2),
        "least step (ms)": column.three_digits("roofline_step_s", 1e-3),
        f"{speed} at most": column.three_digits("most_tokens"),
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
        return f"does not fit ({wording.percent(share)})"
    return wording.percent(share) + (", with retries" if share > 1 else "")


def tell_capacity(advice: pd.DataFrame) -> Blocks:
    """Return the largest batch of each method that fits; nothing without capacity results."""
    rows = advice.assign(target=advice["target"].fillna(wording.THIS_MACHINE))
    columns = {
        "model": column.words(_name_training),
        "target": column.text("target"),
        "dtype": column.text("dtype"),
        "T": column.SIZE,
        "method": column.text("method"),
        "verdict": column.text("verdict"),
        "largest batch": Column(partial(wording.count_batch, name="largest_batch_size")),
        "its peak (GiB)": column.amount("largest_peak_bytes", wording.GIB),
        "safe batch": column.amount("safe_batch_size", digits=0),
        **column.speed(rows),
        "90 % interval": column.interval("tokens_per_s", partial(wording.number, digits=0)),
        "FLOPs x": column.amount("dp_flop_multiplier", digits=2),
    }
    budgets = rows.dropna(subset=["budget_bytes"]).groupby("target")["budget_bytes"].first()
    memory = ", ".join(f"{name} {size / wording.GIB:,.1f} GiB" for name, size in budgets.items())
    caption = (
        f"The largest batch whose predicted peak fits in memory ({memory or 'none does'}), and a "
        "safe batch: its allocator never has to release its cache. "
        "Tokens per second are predicted at the safe batch; close means that no difference from "
        "the first is predicted, since the 90 % interval of the ratio of times holds 1. A + marks "
        "a search that ended before the memory was full. FLOPs x is executed FLOPs over model "
        "FLOPs."
    )
    return tabulate(caption, columns, rows, "advice.csv")


def _name_training(row: Any) -> str:
    """Return the model, and what of it is trained where that is not everything."""
    parts = {"lora": " with LoRA ({})", "parallel": ", {}", "trainable": ", training {}"}
    told = (
        form.format(row[name]) for name, form in parts.items() if isinstance(row.get(name), str)
    )
    return str(row["model"]) + "".join(told)


def tell_budget(noise: pd.DataFrame, budget: pd.DataFrame) -> Blocks:
    """Return noise over batch sizes and hours by method; nothing without a privacy budget."""
    if budget.empty:
        return []
    blocks: Blocks = []
    for _, rows in noise.groupby("tokens_per_sample"):
        blocks += _tell_noise(rows)
    blocks += _tell_hours(budget.dropna(subset=["method"]))
    messages = []
    for message, rows in budget.dropna(subset=["message"]).groupby("message", sort=False):
        methods = ", ".join(dict.fromkeys(rows["method"].dropna()))
        messages.append(f"{methods}: {message}." if methods else f"{message}.")
    return blocks + list_items(messages)


def _tell_noise(rows: pd.DataFrame) -> Blocks:
    first = rows.iloc[0]
    epochs = first["tokens"] / first["tokens_per_sample"] / first["samples"]
    columns = {
        "batch": column.amount("batch_size", digits=0),
        "used": column.words(lambda row: "yes" if row["chosen"] else ""),
        "sample rate": column.share("sample_rate", 3),
        "steps": column.amount("steps", digits=0),
        "noise multiplier": column.amount("noise_multiplier", digits=3),
        "of a step": column.three_digits("step_noise", 1e-6),
        "of the training": column.three_digits("training_noise", 1e-6),
    }
    budget = f"({first['epsilon']:g}, {first['delta']:g})-differential privacy"
    caption = (
        f"What {budget} asks for, by the accountant {first['accountant']}, over batch sizes: "
        f"{first['samples']:,.0f} samples of {first['tokens_per_sample']:,.0f} tokens, and "
        f"{first['tokens']:,.0f} tokens to train on, which are {epochs:,.3g} times the data. A "
        "step draws each sample with the sample rate. The noise of a step's averaged gradient is "
        "the noise multiplier over the batch; that of the average over the training is less by the "
        "root of the steps; both in millionths of the clipping bound."
    )
    return tabulate(caption, columns, rows, "noise.csv")


def _tell_hours(rows: pd.DataFrame) -> Blocks:
    columns = {
        "model": column.text("model"),
        "T": column.SIZE,
        "target": column.text("target"),
        "method": column.text("method"),
        "epsilon": Column(lambda row: "none" if pd.isna(row["epsilon"]) else f"{row['epsilon']:g}"),
        "batch": column.amount("batch_size", digits=0),
        "noise multiplier": column.amount("noise_multiplier", digits=3),
        "same batch": column.amount("same_batch_noise_multiplier", digits=3),
        "micro-batches": Column(
            lambda row: (
                "-"
                if pd.isna(row["accumulation_steps"])
                else f"{row['accumulation_steps']:,.0f} x {row['micro_batch_size']:,.0f}"
            )
        ),
        "GPU hours": column.three_digits("gpu_hours"),
        "90 % interval": column.interval("gpu_hours"),
        "price": column.three_digits("price"),
        "x standard": column.amount("hours_ratio", digits=2),
    }
    if rows["price"].isna().all():
        del columns["price"]
    caption = (
        "GPU hours on one GPU, predicted. At the first epsilon the batch is the one that is used; "
        "another epsilon keeps the steps and the noise of each step's averaged gradient, and so "
        "needs another batch and other hours. With the first epsilon's batch, hours stay; the "
        "column same batch has the noise multiplier for it. A step has so many micro-batches of "
        "so many samples, as many as safely fit, then noise and optimizer once. Batches vary by "
        "Poisson sampling; hours are those of the expected number of samples."
    )
    here = rows.assign(target=rows["target"].fillna(wording.THIS_MACHINE))
    return tabulate(caption, columns, here, "budget.csv")


_RECONCILED: Mapping[Any, str] = {True: "yes", False: "no"}


def reconciliation(composition: pd.DataFrame, peaks: pd.DataFrame) -> Blocks:
    """Return the gaps between recorded and allocator's peaks, and how owners were identified."""
    here = composition["target"].isna() | composition["allocator_peak_bytes"].notna()
    rows = composition[here]
    estimated = peaks[peaks["instrument"] == "estimate"].groupby("experiment_id")["peak_bytes"]
    rows = rows.assign(estimated=rows["experiment_id"].map(estimated.first()))
    columns = {
        "recorded (MiB)": column.amount("peak_bytes", wording.MIB, 2),
        "from": column.text("instrument"),
        "allocator (MiB)": column.amount("allocator_peak_bytes", wording.MIB, 2),
        "gap": column.amount("gap_bytes", digits=0),
        "bound": column.amount("bound_bytes", digits=0),
        "reconciled": column.words(lambda row: _RECONCILED.get(row["valid"], "-")),
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
        name.removeprefix("by_").removesuffix("_bytes"): column.amount(name, 0.01, 2)
        for name in grades
    }
    graded = (
        "How owners at the peak were identified, in percent of the peak: by an attribute that "
        "refers to the tensor, by the operator and module that created it, or only by the phase."
    )
    return [
        *tabulate_experiments(caption, columns, rows, "peaks.csv"),
        *tabulate_experiments(graded, evidence, shares, "peaks.csv"),
    ]


def _estimate_against_memory(row: Any) -> str:
    if row["instrument"] != "memory" or pd.isna(row["estimated"]):
        return "-"
    more = int(row["estimated"] - row["peak_bytes"])
    return f"{more:+,}" if more else "equal"
