"""The section on what a privacy budget costs."""

from typing import Any

import pandas as pd

from dpprof.report.rendering.document import Bullets, Paragraph, Table
from dpprof.report.sections.tables import Cell, column, tabulate
from dpprof.report.wording import number, significant, text_of

TITLE = "What a privacy budget costs"
_NOISE, _COSTS = "results/tables/noise.csv", "results/tables/budget.csv"


def tell_budget(noise: pd.DataFrame, budget: pd.DataFrame) -> list[Paragraph | Bullets | Table]:
    """Return noise over batch sizes and hours by method; nothing without a privacy budget."""
    if budget.empty:
        return []
    said: list[Paragraph | Bullets | Table] = []
    for _, rows in noise.groupby("tokens_per_sample"):
        said += [_tell_noise(rows)]
    priced = budget.dropna(subset=["method"])
    if len(priced):
        said.append(_tell_hours(priced))
    messages = budget.dropna(subset=["message"])
    told = []
    for message, rows in messages.groupby("message", sort=False):
        methods = ", ".join(dict.fromkeys(rows["method"].dropna()))
        told.append(f"{methods}: {message}." if methods else f"{message}.")
    return [*said, Bullets(items=tuple(told))] if told else said


def _tell_noise(rows: pd.DataFrame) -> Table | Paragraph:
    one = rows.iloc[0]
    epochs = one["tokens"] / one["tokens_per_sample"] / one["samples"]
    columns: dict[str, Cell] = {
        "batch": lambda row: number(row["batch_size"], digits=0),
        "used": lambda row: "yes" if row["chosen"] else "",
        "sample rate": lambda row: _scientific(row["sample_rate"]),
        "steps": lambda row: number(row["steps"], digits=0),
        "noise multiplier": lambda row: number(row["noise_multiplier"], digits=3),
        "of a step": lambda row: _scientific(row["step_noise"]),
        "of the training": lambda row: _scientific(row["training_noise"]),
    }
    budget = f"({one['epsilon']:g}, {one['delta']:g})-differential privacy"
    caption = (
        f"What {budget} asks for, by the accountant {one['accountant']}, over batch sizes: "
        f"{one['samples']:,.0f} samples of {one['tokens_per_sample']:,.0f} tokens, and "
        f"{one['tokens']:,.0f} tokens to train on, which are {epochs:,.3g} times the data. A step "
        "draws each sample with the sample rate. The noise of a step's averaged gradient is the "
        "noise multiplier over the batch; that of the average over the training is less by the "
        "root of the steps; both in units of the clipping bound."
    )
    return tabulate(caption, columns, rows, ("used",), _NOISE)


def _tell_hours(rows: pd.DataFrame) -> Table | Paragraph:
    columns: dict[str, Cell] = {
        "model": column("model"),
        "T": column("seq_len"),
        "target": lambda row: "this machine" if pd.isna(row["target"]) else text_of(row["target"]),
        "method": column("method"),
        "epsilon": lambda row: "none" if pd.isna(row["epsilon"]) else f"{row['epsilon']:g}",
        "batch": lambda row: number(row["batch_size"], digits=0),
        "noise multiplier": lambda row: number(row["noise_multiplier"], digits=3),
        "same batch": lambda row: number(row["same_batch_noise_multiplier"], digits=3),
        "micro-batches": _micro_batches,
        "GPU hours": lambda row: significant(row["gpu_hours"]),
        "90 % interval": _interval,
        "price": lambda row: significant(row["price"]),
        "x standard": lambda row: number(row["hours_ratio"], digits=2),
    }
    if rows["price"].isna().all():
        del columns["price"]
    caption = (
        "GPU hours on one GPU, predicted. At the first epsilon the batch is the one that is used; "
        "another epsilon keeps the steps and the noise of each step's averaged gradient, and so "
        "needs another batch and other hours. With the same batch the hours would stay, and the "
        "noise multiplier would be that under same batch. A step has so many micro-batches of "
        "so many samples, as many as safely fit, then noise and optimizer once. Batches vary by "
        "Poisson sampling; hours are those of the expected number of samples."
    )
    return tabulate(caption, columns, rows, ("model", "target", "method"), _COSTS)


def _scientific(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.3g}"


def _micro_batches(row: Any) -> str:
    if pd.isna(row["accumulation_steps"]):
        return "-"
    return f"{row['accumulation_steps']:,.0f} x {row['micro_batch_size']:,.0f}"


def _interval(row: Any) -> str:
    low, high = (significant(row[f"gpu_hours_{end}"]) for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"
