"""How sentences name settings and say figures: several that say the same become one."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpprof.analysis.tables.axes import name_model
from dpprof.report.cells import listed, number, significant, text_of

_FEW = 2
ALIKE = 0.005
"""A ratio this near to 1 is 1.00 in two digits."""

_SHORT = {"seq_len": "T", "batch_size": "B"}
THIS_MACHINE = "this machine"


def name_training(row: Any) -> str:
    """Return the model, and what of it is trained where that is not everything."""
    lora, trainable = text_of(row["lora"]), text_of(row["trainable"])
    name = str(row["model"]) + ("" if lora == "-" else f" with LoRA ({lora})")
    if isinstance(row.get("parallel"), str):
        name += f", {row['parallel']}"
    return name + ("" if trainable == "-" else f", training {trainable}")


def name_settings(rows: pd.DataFrame, axes: Sequence[str] = ("seq_len", "batch_size")) -> str:
    """Return settings of one model in a few words: ``small at T = 64 to 256 and B = 4``.

    Where not every combination of the values is among them, their number is added.
    """
    said = [f"{_SHORT.get(name, name)} = {_span_of(rows[name])}" for name in axes]
    named = (
        f"{name_model(rows.iloc[0])} at {' and '.join(said)}" if said else name_model(rows.iloc[0])
    )
    combinations = 1
    for name in axes:
        combinations *= rows[name].map(str).nunique()
    settings = len(rows[list(axes)].map(str).drop_duplicates()) if said else 1
    return named if settings == combinations else f"{named} ({settings:,} settings)"


def name_setting(row: Any) -> str:
    """Return a setting with its batch: ``small (T = 128, B = 4)``."""
    return f"{name_model(row)} (T = {row['seq_len']:,}, B = {row['batch_size']:,})"


def _span_of(values: "pd.Series[Any]") -> str:
    known = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    texts = [f"{v:,}" if isinstance(v, int | float) else text_of(v) for v in known]
    ordered = all(isinstance(v, int | float) for v in known)
    return f"{texts[0]} to {texts[-1]}" if ordered and len(texts) > _FEW else listed(texts)


def times(ratio: float) -> str:
    """Return a ratio as a factor in words: ``1.55 times``."""
    return f"{number(ratio, digits=2)} times"


def is_alike(ratio: float) -> bool:
    """Return whether a ratio is 1 in the two digits that are shown."""
    return abs(ratio - 1) < ALIKE


def span_of(values: "pd.Series[Any]", unit: float = 1.0, digits: int = 1) -> str:
    """Return the range of figures in a unit: ``243.4 to 243.8``, or one where they agree."""
    low, high = (number(values.astype(float).agg(end), unit, digits) for end in ("min", "max"))
    return low if low == high else f"{low} to {high}"


def span_of_ratios(ratios: "pd.Series[float]") -> str:
    """Return the range of ratios in words: ``1.36 to 2.84 times``."""
    low, high = (number(ratios.agg(end), digits=2) for end in ("min", "max"))
    return f"{low} times" if low == high else f"{low} to {high} times"


def rounded(value: float | None) -> str:
    """Return a figure with three significant digits, and no more: ``14,700,000``."""
    if value is None or pd.isna(value):
        return "-"
    return significant(float(f"{value:.3g}"))
