"""The section on which batches fit."""

from typing import Any

import pandas as pd

from dpprof.report.rendering.document import Blocks
from dpprof.report.sections.tables import (
    Column,
    amount,
    tabulate,
    text,
    whole,
    words,
)
from dpprof.report.wording import THIS_MACHINE, name_training, number, reach

_GIB = 2**30


def tell_capacity(advice: pd.DataFrame) -> Blocks:
    """Return the largest batch of each method that fits; nothing without capacity results."""
    rows = advice.assign(target=advice["target"].fillna(THIS_MACHINE))
    columns = {
        "model": words(name_training),
        "target": text("target"),
        "dtype": text("dtype"),
        "T": whole("seq_len"),
        "method": text("method"),
        "verdict": text("verdict"),
        "largest batch": Column(_largest),
        "its peak (GiB)": amount("largest_peak_bytes", _GIB),
        "safe batch": amount("safe_batch_size", digits=0),
        "tokens/s": amount("tokens_per_s", digits=0),
        "90 % interval": Column(_interval),
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


def _interval(row: Any) -> str:
    return reach(*(number(row[f"tokens_per_s_{end}"], digits=0) for end in ("low", "high")))


def _largest(row: Any) -> str:
    more = "+" if row["limited_by"] == "search" else ""
    return number(row["largest_batch_size"], digits=0) + more
