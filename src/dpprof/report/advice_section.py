"""The section on which batches fit and which method to use."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from dpprof.report.cells import Cell, column, listed, number, plural, tabulate
from dpprof.report.document import Bullets, Paragraph, Table
from dpprof.report.wording import THIS_MACHINE, name_training, span_of

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


def tell_advice(advice: pd.DataFrame) -> list[Bullets]:
    """Return one sentence per setting on which method to use; nothing without capacity results."""
    said = tuple(_sentences(_name_targets(advice)))
    return [Bullets(items=said)] if said else []


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


def _sentences(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence for all sequence lengths of which the same is to be said."""
    alike: dict[tuple[str, ...], list[pd.DataFrame]] = defaultdict(list)
    for _, options in rows.groupby(_SETTING, sort=False, dropna=False):
        alike[_what_is_said(options)].append(options)
    for same in alike.values():
        yield _sentence(same)


def _what_is_said(options: pd.DataFrame) -> tuple[str, ...]:
    first = options.iloc[0]
    judged = sorted(zip(options["method"], options["verdict"], strict=True))
    return (str(first["target"]), name_training(first), str(first["dtype"]), *map(str, judged))


def _sentence(settings: Sequence[pd.DataFrame]) -> str:
    options = settings[0]
    first = options.iloc[0]
    target = first["target"]
    lengths = span_of(pd.concat(settings)["seq_len"], digits=0)
    where = f"{name_training(first)} at {lengths} tokens in {first['dtype']}"
    wrong = options.loc[options["verdict"] == "wrong", "method"]
    failed = f"; {listed(wrong)} failed verification" if len(wrong) else ""
    if (options["verdict"] == "unranked").any():
        return f"No time is predicted on {target}, so methods for {where} are not ranked."
    if not (options["verdict"] == "first").any():
        return f"No requested private method safely fits on {target} for {where}{failed}."
    best = pd.concat([one[one["verdict"] == "first"] for one in settings])
    said = (
        f"On {target}, {best['method'].iloc[0]} is predicted to be the fastest private method for "
        f"{where}, at {span_of(best['tokens_per_s'], digits=0)} tokens/s; batches of "
        f"{span_of(best['safe_batch_size'], digits=0)} safely fit"
    )
    close = options.loc[options["verdict"] == "close", "method"]
    if len(close):
        said += f"; no difference is predicted between it and {listed(close)}"
    beyond = options.loc[options["verdict"] == "does not fit", "method"]
    if len(beyond):
        said += f"; {listed(beyond)} {plural(len(beyond), 'does', 'do')} not fit at all"
    return f"{said}{failed}."


def _interval(row: Any) -> str:
    low, high = (number(row[f"tokens_per_s_{end}"], digits=0) for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def _largest(row: Any) -> str:
    return number(row["largest_batch_size"], digits=0) + (
        "+" if row["limited_by"] == "search" else ""
    )
