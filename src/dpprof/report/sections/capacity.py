"""The section on which batches fit."""

from typing import Any

import pandas as pd

from dpprof.report.rendering.document import Paragraph, Table
from dpprof.report.sections.tables import Cell, column, tabulate
from dpprof.report.wording import THIS_MACHINE, name_training, number

_GIB = 2**30
_SETTING = ["model", "lora", "trainable", "parallel", "seq_len", "dtype", "target"]


_NAMING: dict[str, Cell] = {
    "model": name_training,
    "target": column("target"),
    "dtype": column("dtype"),
    "T": column("seq_len"),
    "method": column("method"),
    "verdict": column("verdict"),
}


def tell_capacity(advice: pd.DataFrame) -> list[Paragraph | Table]:
    """Return the largest batch of each method that fits; nothing without capacity results."""
    if advice.empty:
        return []
    rows = _name_targets(advice)
    columns = _NAMING | {
        "largest batch": _largest,
        "its peak (GiB)": lambda row: number(row["largest_peak_bytes"], _GIB),
        "safe batch": lambda row: number(row["safe_batch_size"], digits=0),
        "tokens/s": lambda row: number(row["tokens_per_s"], digits=0),
        "90 % interval": _interval,
        "FLOPs x": lambda row: number(row["dp_flop_multiplier"], digits=2),
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
    texts = tuple(_NAMING.keys() - {"T"})
    return [tabulate(caption, columns, rows, texts, "results/tables/advice.csv")]


def _name_targets(advice: pd.DataFrame) -> pd.DataFrame:
    return advice.assign(target=advice["target"].fillna(THIS_MACHINE))


def _interval(row: Any) -> str:
    low, high = (number(row[f"tokens_per_s_{end}"], digits=0) for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def _largest(row: Any) -> str:
    return number(row["largest_batch_size"], digits=0) + (
        "+" if row["limited_by"] == "search" else ""
    )
