"""Findings in sentences: which method needs least memory, which is fastest, and by how much."""

import pandas as pd

from dpprof.analysis.selection import find_fitting
from dpprof.analysis.statistics import NO_DIFFERENCE
from dpprof.analysis.tables.axes import BASELINE, name_model
from dpprof.analysis.tables.frames import naming_axes
from dpprof.records.terms import COMPONENTS
from dpprof.report.cells import listed, number, span
from dpprof.report.document import Bullets, Paragraph
from dpprof.report.wording import name_setting, name_settings, span_of, span_of_ratios

MAX_SENTENCES = 8
"""With more, the findings count over all settings instead of naming them."""

_PEAKS = {"allocated": "allocated", "rss": "resident, libraries included"}


def tell_findings(settings: pd.DataFrame, methods: pd.DataFrame) -> list[Bullets | Paragraph]:
    """Return the findings about settings and methods as sentences."""
    if settings.empty:
        return [Paragraph(text="No private method succeeded, so there is nothing to compare.")]
    said = _joined(settings)
    if len(said) > MAX_SENTENCES:
        said = _all(settings, methods)
    return [Bullets(items=tuple(said))]


def _joined(settings: pd.DataFrame) -> list[str]:
    """Return a sentence for all settings of a model in which the same methods win."""
    ordered = settings.sort_values(["parameters_total", "seq_len", "batch_size"], ascending=False)
    axes = ["seq_len", "batch_size", *naming_axes(settings, but=("model", "seq_len", "batch_size"))]
    ordered = ordered.assign(named=[name_model(row) for _, row in ordered.iterrows()])
    alike = ["named", "smallest", "fastest", "peak_kind"]
    said = []
    for _, rows in ordered.groupby(alike, sort=False, dropna=False):
        facts = filter(None, (_smallest(rows), _fastest(rows)))
        told = "; ".join(facts) or "peaks and times are unknown"
        said.append(f"For {name_settings(rows, axes)}: {told}.")
    return said


def _smallest(rows: pd.DataFrame) -> str | None:
    row = rows.iloc[0]
    if pd.isna(row["smallest"]):
        return None
    peaks = span_of(rows["smallest_peak_bytes"], 2**20)
    ratios = rows["smallest_ratio"].dropna().astype(float)
    over = f" ({span_of_ratios(ratios)} standard)" if len(ratios) else ""
    kind = _PEAKS[row["peak_kind"]]
    return f"{row['smallest']} has the lowest peak of the private methods, {peaks} MiB {kind}{over}"


def _fastest(rows: pd.DataFrame) -> str | None:
    row = rows.iloc[0]
    if pd.isna(row["fastest"]):
        return None
    said = f"{row['fastest']} is fastest, at {span_of(rows['fastest_step_s'], 1e-3)} ms per step"
    ratios = rows["fastest_ratio"].dropna().astype(float)
    if len(ratios):
        undetected = int((rows["fastest_verdict"] == NO_DIFFERENCE).sum())
        if undetected == len(rows):
            said += " (no difference from standard detected)"
        else:
            interval = "-"
            if len(rows) == 1:
                interval = span(row["fastest_ratio_low"], row["fastest_ratio_high"], digits=2)
            between = "" if interval == "-" else f", 95 % interval {interval}"
            some = f", in {undetected:,} no difference detected" if undetected else ""
            said += f" ({span_of_ratios(ratios)} standard{between}{some})"
    if not rows["noise_known"].astype(bool).all():
        return f"{said}, but without replicates the noise is unknown"
    alike = sorted({name for names in rows["not_slower"].dropna() for name in names.split()})
    if not alike:
        return said
    some = "" if len(set(rows["not_slower"].map(str))) == 1 else " in some of them"
    return f"{said}, with no detectable difference{some} from {listed(alike)}"


def tell_memory(composition: pd.DataFrame) -> list[Bullets | Paragraph]:
    """Return the main owner of the largest setting's highest peak; nothing without records."""
    here = composition[composition["target"].isna()]
    return [Bullets(items=(_highest_peak(here),))] if len(here) else []


def tell_fits(composition: pd.DataFrame) -> list[Bullets | Paragraph]:
    """Return which methods fit on each target, by the predicted peaks; nothing without targets."""
    targets = composition.dropna(subset=["target_memory_bytes"]).groupby("target")
    fits = tuple(_fitting(str(target), rows) for target, rows in targets)
    return [Bullets(items=fits)] if fits else []


def _highest_peak(rows: pd.DataFrame) -> str:
    sizes = rows[["parameters_total", "batch_size", "seq_len"]].astype(float).prod(axis=1)
    largest = rows[sizes == sizes.max()]
    row = largest.loc[largest["peak_bytes"].idxmax()]
    owner = max(COMPONENTS, key=lambda name: row[name])
    return (
        f"In {name_setting(row)}, {row['method']} has the highest peak, "
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
