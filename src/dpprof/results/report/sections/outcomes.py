"""The sections on caveats, on how runs ended, and on missing runs."""

import pandas as pd

from dpprof.experiments.records.terms import OUTCOMES
from dpprof.results.report.rendering.document import Blocks, Bullets, Paragraph
from dpprof.results.report.sections.tables import MAX_ROWS, Column, tabulate, text, whole, words
from dpprof.results.report.wording import percent, text_of

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

_FAILURE = ["method", "outcome", "error_kind", "error_phase"]


def tell_caveats(findings: pd.DataFrame) -> Blocks:
    """Return every finding; the first page counts them by kind."""
    columns = {
        "experiment": words(lambda row: f"{row['experiment_id']} {row['instrument']}"),
        "caveat": text("finding"),
    }
    return tabulate("Read these caveats before the numbers.", columns, findings, "findings.csv")


def tell_outcomes(outcomes: pd.DataFrame, runs: pd.DataFrame) -> Blocks:
    """Return outcome counts by method, then every failure, or the kinds of failures if many."""
    columns = {"method": text("method"), "runs": whole("runs")}
    columns |= {outcome: whole(outcome) for outcome in OUTCOMES}
    columns["success"] = Column(
        lambda row: "unknown" if pd.isna(row["success_rate"]) else percent(row["success_rate"])
    )
    failed = runs[runs["outcome"] != "ok"]
    blocks: Blocks = [
        *tabulate("Outcomes by method.", columns, outcomes, "outcomes.csv"),
        *(_kinds(failed) if len(failed) > MAX_ROWS else _failures(failed)),
    ]
    again = runs[(runs["attempts"] > 1) & (runs["outcome"] == "ok")]
    if len(again):
        names = sorted(set(again["experiment_id"]))
        told = ", ".join(names) if len(names) <= MAX_ROWS else f"{len(names):,} experiments"
        blocks.append(Paragraph(text=f"These succeeded only at the second attempt: {told}."))
    return blocks


def _failures(failed: pd.DataFrame) -> Blocks:
    columns = {
        "experiment": words(
            lambda row: f"{row['experiment_id']} {row['instrument']} r{row['replicate']}"
        ),
        "outcome": text("outcome"),
        "kind": text("error_kind"),
        "phase": text("error_phase"),
        "message": words(lambda row: text_of(row["error_message"])[:200]),
        "log": text("error_log"),
    }
    return tabulate("Failed runs, with their log files.", columns, failed, "runs.csv")


def _kinds(failed: pd.DataFrame) -> Blocks:
    """Return counts of equal failures, each with one message as an example."""
    alike = failed.fillna(dict.fromkeys(_FAILURE, "-")).groupby(_FAILURE)
    counted = alike.agg(runs=("replicate", "size"), message=("error_message", "first"))
    counted = counted.reset_index().sort_values("runs", ascending=False)
    columns = {
        "method": text("method"),
        "outcome": text("outcome"),
        "kind": text("error_kind"),
        "phase": text("error_phase"),
        "runs": whole("runs"),
        "for example": words(lambda row: text_of(row["message"])[:200]),
    }
    caption = "Failed runs by kind; results/tables/runs.csv lists every run."
    return tabulate(caption, columns, counted, "runs.csv")


def tell_missing(missing: pd.DataFrame) -> Blocks:
    """Return the runs without a result, or their counts by method if many."""
    if missing.empty:
        return []
    if len(missing) <= MAX_ROWS:
        items = [
            f"{row['experiment_id']} {row['instrument']} r{row['replicate']}: {row['reason']}"
            for _, row in missing.iterrows()
        ]
    else:
        counts = missing["method"].value_counts()
        items = [f"{method}: {count:,}" for method, count in counts.items()]
        items.append("results/tables/missing.csv lists every run.")
    return [Bullets(items=tuple(items))]
