"""How sentences name settings and figures."""

from typing import Any

import pandas as pd

from dpprof.analysis.tables.axes import name_model
from dpprof.report.cells import number, significant, text_of

ALIKE = 0.005
"""A ratio this near to 1 is 1.00 in two digits."""

THIS_MACHINE = "this machine"


def name_training(row: Any) -> str:
    """Return the model, and what of it is trained where that is not everything."""
    lora, trainable = text_of(row["lora"]), text_of(row["trainable"])
    name = str(row["model"]) + ("" if lora == "-" else f" with LoRA ({lora})")
    if isinstance(row.get("parallel"), str):
        name += f", {row['parallel']}"
    return name + ("" if trainable == "-" else f", training {trainable}")


def name_setting(row: Any) -> str:
    """Return a setting with its batch: ``small (T = 128, B = 4)``."""
    return f"{name_model(row)} (T = {row['seq_len']:,}, B = {row['batch_size']:,})"


def times(ratio: float) -> str:
    """Return a ratio as a factor in words: ``1.55 times``."""
    return f"{number(ratio, digits=2)} times"


def is_alike(ratio: float) -> bool:
    """Return whether a ratio is 1 in the two digits that are shown."""
    return abs(ratio - 1) < ALIKE


def span_of_ratios(ratios: "pd.Series[float]") -> str:
    """Return the range of ratios in words: ``1.36 to 2.84 times``."""
    low, high = (number(ratios.agg(end), digits=2) for end in ("min", "max"))
    return f"{low} times" if low == high else f"{low} to {high} times"


def rounded(value: float | None) -> str:
    """Return a figure with three significant digits, and no more: ``14,700,000``."""
    if value is None or pd.isna(value):
        return "-"
    return significant(float(f"{value:.3g}"))
