"""Findings in sentences: which method needs least memory, which is fastest, and by how much."""

from typing import Any

import pandas as pd

from dpprof.analysis.axes import BASELINE, name_model
from dpprof.analysis.frames import naming_axes
from dpprof.analysis.peak_composition import find_fitting
from dpprof.analysis.statistics import NO_DIFFERENCE
from dpprof.records.terms import COMPONENTS
from dpprof.report.cells import listed, number, plural, span
from dpprof.report.document import Bullets, Paragraph

MAX_SETTINGS = 8
"""With more settings, the findings summarise all instead of listing each."""

_SHORT = {"seq_len": "T", "batch_size": "B"}
_PEAKS = {"allocated": "allocated", "rss": "resident, libraries included"}


def tell_findings(settings: pd.DataFrame, methods: pd.DataFrame) -> list[Bullets | Paragraph]:
    """Return the findings about settings and methods as sentences."""
    if settings.empty:
        return [Paragraph(text="No private method succeeded, so there is nothing to compare.")]
    said = _each(settings) if len(settings) <= MAX_SETTINGS else _all(settings, methods)
    return [Bullets(items=tuple(said))]


def _each(settings: pd.DataFrame) -> list[str]:
    ordered = settings.sort_values(["parameters_total", "seq_len", "batch_size"], ascending=False)
    others = naming_axes(settings, but=("model", "seq_len", "batch_size"))
    named = ["seq_len", "batch_size", *others]
    said = []
    for _, row in ordered.iterrows():
        where = [name_model(row), *(f"{_SHORT.get(name, name)} = {row[name]}" for name in named)]
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
    return f"{row['smallest']} has the lowest peak, {peak} MiB {_PEAKS[row['peak_kind']]}{ratio}"


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
    step = f"{number(row['fastest_step_s'], 1e-3)} ms per step"
    said = f"{row['fastest']} is fastest, at {step}{ratio}"
    if not row["noise_known"]:
        return f"{said}, but without replicates the noise is unknown"
    if pd.isna(row["not_slower"]):
        return said
    return f"{said}, with no detectable difference from {listed(row['not_slower'].split())}"


def tell_memory(composition: pd.DataFrame) -> list[Bullets | Paragraph]:
    """Return the main owner of the largest setting's highest peak, and what fits on targets."""
    here = composition[composition["target"].isna()]
    said = [] if here.empty else [_highest_peak(here)]
    targets = composition.dropna(subset=["target_memory_bytes"]).groupby("target")
    if fits := [_fitting(str(target), rows) for target, rows in targets]:
        said.append(" ".join(fits))
    return [Bullets(items=tuple(said))] if said else []


def _highest_peak(rows: pd.DataFrame) -> str:
    sizes = rows[["parameters_total", "batch_size", "seq_len"]].astype(float).prod(axis=1)
    largest = rows[sizes == sizes.max()]
    row = largest.loc[largest["peak_bytes"].idxmax()]
    owner = max(COMPONENTS, key=lambda name: row[name])
    where = f"{name_model(row)}, T = {row['seq_len']}, B = {row['batch_size']}"
    return (
        f"{where}: {row['method']} has the highest peak, "
        f"{number(row['peak_bytes'], 2**20)} MiB in the phase {_plain(row['phase'])}; "
        f"{row[owner] / row['peak_bytes']:.0%} of it is {_plain(owner)}."
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _fitting(target: str, rows: pd.DataFrame) -> str:
    """Return which methods fit on a target in every setting, in some and in none."""
    fits = find_fitting(rows)
    share = fits.groupby(rows["method"]).mean()
    groups = {
        "in every setting": share.index[share == 1],
        "in some settings": share.index[(share > 0) & (share < 1)],
        "in no setting": share.index[share == 0],
    }
    said = [f"{where} {listed(names)}" for where, names in groups.items() if len(names)]
    return f"Predicted to fit on {target}: {'; '.join(said)}."


def _all(settings: pd.DataFrame, methods: pd.DataFrame) -> list[str]:
    said = []
    for column, what in (("smallest", "with the lowest peak"), ("fastest", "that is fastest")):
        counts = settings[column].value_counts()
        known = int(counts.sum())
        shares = [f"{name} in {count:,}" for name, count in counts.items()]
        if shares:
            said.append(f"The private method {what}, over {known:,} settings: {', '.join(shares)}.")
    for ratio, what in (("peak_ratio", "peak memory"), ("step_ratio", "step time")):
        private = methods[(methods["method"] != BASELINE) & (methods[f"{ratio}_count"] > 0)]
        shares = [
            f"{row['method']} {row[f'{ratio}_median']:.2f} "
            f"({span(row[f'{ratio}_min'], row[f'{ratio}_max'], digits=2)})"
            for _, row in private.sort_values(f"{ratio}_median").iterrows()
        ]
        if shares:
            said.append(
                f"Ratio to standard's {what}, median over settings (range): {', '.join(shares)}."
            )
    return said
