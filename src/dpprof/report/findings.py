"""What was found, in sentences: which method needs least, which is fastest, by how much."""

from typing import Any

import pandas as pd

from dpprof.analysis.frames import BASELINE, varying_axes
from dpprof.analysis.statistics import NO_DIFFERENCE
from dpprof.report.cells import number, plural, span
from dpprof.report.document import Bullets, Paragraph

MAX_SETTINGS = 8
"""With more settings, the findings count over all of them instead of telling each."""

_SHORT = {"seq_len": "T", "batch_size": "B"}
_PEAKS = {"allocated": "allocated", "rss": "resident, libraries included"}


def tell_findings(settings: pd.DataFrame, methods: pd.DataFrame) -> list[Bullets | Paragraph]:
    """Say what the settings and the methods of the tables amount to.

    Args:
        settings: The table ``settings``.
        methods: The table ``methods``.
    """
    if settings.empty:
        return [Paragraph(text="No private method succeeded, so there is nothing to compare.")]
    said = _each(settings) if len(settings) <= MAX_SETTINGS else _all(settings, methods)
    return [Bullets(items=tuple(said))]


def _each(settings: pd.DataFrame) -> list[str]:
    ordered = settings.sort_values(["parameters_total", "seq_len", "batch_size"], ascending=False)
    others = varying_axes(settings, but=("model", "seq_len", "batch_size"))
    named = ["seq_len", "batch_size", *others]
    said = []
    for _, row in ordered.iterrows():
        where = [str(row["model"]), *(f"{_SHORT.get(name, name)} = {row[name]}" for name in named)]
        compared = f"of {row['methods']} private {plural(row['methods'], 'method')}"
        facts = [_smallest(row), _fastest(row)]
        told = "; ".join(fact for fact in facts if fact) or "peaks and times are unknown"
        said.append(f"{', '.join(where)}: {compared}, {told}.")
    return said


def _smallest(row: Any) -> str | None:
    if pd.isna(row["smallest"]):
        return None
    ratio = _ratio(row["smallest_ratio"])
    peak = number(row["smallest_peak_bytes"], 2**20)
    return f"{row['smallest']} peaks lowest, at {peak} MiB {_PEAKS[row['peak_kind']]}{ratio}"


def _ratio(ratio: float, interval: str = "-") -> str:
    if pd.isna(ratio):
        return ""
    between = "" if interval == "-" else f", 95 % interval {interval}"
    return f" ({ratio:.2f} times standard{between})"


def _fastest(row: Any) -> str | None:
    if pd.isna(row["fastest"]):
        return None
    interval = span(row["fastest_ratio_low"], row["fastest_ratio_high"], digits=2)
    ratio = _ratio(row["fastest_ratio"], interval)
    if row["fastest_verdict"] == NO_DIFFERENCE:
        ratio = " (no difference from standard detected)"
    said = f"{row['fastest']} is fastest, at {number(row['fastest_step_s'], 1e-3)} ms a step{ratio}"
    if not row["noise_known"]:
        return f"{said}, but nothing was replicated, so how sure that is cannot be told"
    if pd.isna(row["not_slower"]):
        return said
    return f"{said}, not distinguishable in time from {_listed(row['not_slower'].split())}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _all(settings: pd.DataFrame, methods: pd.DataFrame) -> list[str]:
    said = []
    for column, what in (("smallest", "peaks lowest"), ("fastest", "is fastest")):
        counts = settings[column].value_counts()
        known = int(counts.sum())
        shares = [f"{name} in {count:,}" for name, count in counts.items()]
        if shares:
            said.append(f"The private method that {what} of {known:,} settings: {_comma(shares)}.")
    for ratio, what in (("peak_ratio", "peak memory"), ("step_ratio", "step time")):
        private = methods[(methods["method"] != BASELINE) & (methods[f"{ratio}_count"] > 0)]
        shares = [
            f"{row['method']} {row[f'{ratio}_median']:.2f} "
            f"({span(row[f'{ratio}_min'], row[f'{ratio}_max'], digits=2)})"
            for _, row in private.sort_values(f"{ratio}_median").iterrows()
        ]
        if shares:
            said.append(
                f"Times standard's {what}, median over settings and range: {_comma(shares)}."
            )
    return said


def _comma(parts: list[str]) -> str:
    return ", ".join(parts)
