"""The section on what a privacy budget costs."""

from typing import Any

import pandas as pd

from dpprof.results.report.rendering.document import Blocks, Bullets
from dpprof.results.report.sections.tables import (
    Column,
    amount,
    interval,
    share,
    sizes,
    tabulate,
    text,
    three_digits,
    words,
)
from dpprof.results.report.wording import THIS_MACHINE

TITLE = "What a privacy budget costs"


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
    return [*blocks, Bullets(items=tuple(messages))] if messages else blocks


def _tell_noise(rows: pd.DataFrame) -> Blocks:
    first = rows.iloc[0]
    epochs = first["tokens"] / first["tokens_per_sample"] / first["samples"]
    columns = {
        "batch": amount("batch_size", digits=0),
        "used": words(lambda row: "yes" if row["chosen"] else ""),
        "sample rate": share("sample_rate", 3),
        "steps": amount("steps", digits=0),
        "noise multiplier": amount("noise_multiplier", digits=3),
        "of a step": three_digits("step_noise", 1e-6),
        "of the training": three_digits("training_noise", 1e-6),
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
    rows = rows.assign(target=rows["target"].fillna(THIS_MACHINE))
    columns = {
        "model": text("model"),
        "T": sizes(),
        "target": text("target"),
        "method": text("method"),
        "epsilon": Column(lambda row: "none" if pd.isna(row["epsilon"]) else f"{row['epsilon']:g}"),
        "batch": amount("batch_size", digits=0),
        "noise multiplier": amount("noise_multiplier", digits=3),
        "same batch": amount("same_batch_noise_multiplier", digits=3),
        "micro-batches": Column(_micro_batches),
        "GPU hours": three_digits("gpu_hours"),
        "90 % interval": interval("gpu_hours"),
        "price": three_digits("price"),
        "x standard": amount("hours_ratio", digits=2),
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
    return tabulate(caption, columns, rows, "budget.csv")


def _micro_batches(row: Any) -> str:
    if pd.isna(row["accumulation_steps"]):
        return "-"
    return f"{row['accumulation_steps']:,.0f} x {row['micro_batch_size']:,.0f}"
