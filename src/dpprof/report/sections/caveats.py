"""The caveats: each finding, or counts of each kind where there are many."""

import pandas as pd

from dpprof.report.rendering.document import Paragraph, Table
from dpprof.report.sections.tables import MAX_ROWS, Cell, amount, column, tabulate
from dpprof.report.wording import listed

MEANINGS = {
    "contended": "other processes kept cores busy, so times are too long",
    "gpu-shared": "others used the GPU, so times may be too long",
    "shared-host": "others ran beside them on the same host",
    "devices-differ": "runs of other machines do not count",
    "settings-differ": "runs were measured under different settings",
    "peaks-differ": "peaks differ between processes",
    "memory-unreconciled": "the allocator does not confirm a recorded peak",
    "beyond-peak": "MFU or HFU is above 1",
    "weak-privacy-budget": "the privacy budget promises hardly anything",
    "ceilings-contended": "ceilings were measured while others were busy",
    "ceilings-exceeded": "kernels were faster than the measured ceilings",
    "other-kernels": "a trace has time of no known kind",
    "fallback": "Opacus fell back to functorch without a word",
    "nonfinite-samples": "samples were not finite",
}
"""What each kind of finding amounts to."""

_FIRST = 3
"""How many of the experiments with a kind of finding are named."""

_SOURCE = "results/tables/findings.csv"


def tell_caveats(findings: pd.DataFrame) -> list[Table | Paragraph]:
    """Return every finding, or the kinds of findings if many."""
    if findings.empty:
        return []
    if len(findings) > MAX_ROWS:
        return [_count(findings)]
    columns: dict[str, Cell] = {
        "experiment": lambda row: f"{row['experiment_id']} {row['instrument']}",
        "caveat": column("finding"),
    }
    caption = "Read these caveats before the numbers."
    return [tabulate(caption, columns, findings, tuple(columns), _SOURCE)]


def _count(findings: pd.DataFrame) -> Table | Paragraph:
    """Return a row for each kind, the most frequent first: how many, the first, and one of them."""
    kinds = findings.groupby("kind", sort=False)
    counted = kinds.agg(
        findings=("finding", "size"),
        experiments=("experiment_id", "nunique"),
        first=("experiment_id", _name_first),
        finding=("finding", "first"),
    )
    counted = counted.reset_index().sort_values("findings", ascending=False, kind="stable")
    columns: dict[str, Cell] = {
        "caveat": lambda row: MEANINGS.get(row["kind"], row["kind"]),
        "findings": amount("findings", digits=0),
        "experiments": amount("experiments", digits=0),
        "the first": column("first"),
        "for example": column("finding"),
    }
    caption = f"Read these caveats before the numbers; {_SOURCE} lists every one."
    text = tuple(name for name in columns if name not in ("findings", "experiments"))
    return tabulate(caption, columns, counted, text, _SOURCE)


def _name_first(names: "pd.Series[str]") -> str:
    """Return the first few names, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    beyond = len(distinct) - _FIRST
    more = [f"{beyond:,} more"] if beyond > 0 else []
    return listed([*distinct[:_FIRST], *more])
