"""The sections on outcomes: counts, failures with their logs, and missing runs."""

import pandas as pd

from dpprof.records.terms import OUTCOMES
from dpprof.report.rendering.document import Blocks, Bullets, Paragraph, Table
from dpprof.report.sections.tables import MAX_ROWS, Cell, column, tabulate
from dpprof.report.wording import text_of

_FAILURE = ["method", "outcome", "error_kind", "error_phase"]


def tell_outcomes(outcomes: pd.DataFrame, runs: pd.DataFrame) -> Blocks:
    """Return outcome counts by method, then every failure, or the kinds of failures if many."""
    columns: dict[str, Cell] = {"method": column("method"), "runs": column("runs")}
    columns |= {outcome: column(outcome) for outcome in OUTCOMES}
    columns["success"] = lambda row: (
        "unknown" if pd.isna(row["success_rate"]) else f"{row['success_rate']:.0%}"
    )
    source = "results/tables/outcomes.csv"
    blocks: Blocks = [tabulate("Outcomes by method.", columns, outcomes, ("method",), source)]
    failed = runs[runs["outcome"] != "ok"]
    if len(failed) > MAX_ROWS:
        blocks.append(_kinds(failed))
    elif len(failed):
        blocks.append(_failures(failed))
    again = runs[(runs["attempts"] > 1) & (runs["outcome"] == "ok")]
    if len(again):
        names = sorted(set(again["experiment_id"]))
        told = ", ".join(names) if len(names) <= MAX_ROWS else f"{len(names):,} experiments"
        blocks.append(Paragraph(text=f"These succeeded only at the second attempt: {told}."))
    return blocks


def _failures(failed: pd.DataFrame) -> Table | Paragraph:
    columns: dict[str, Cell] = {
        "experiment": lambda row: f"{row['experiment_id']} {row['instrument']} r{row['replicate']}",
        "outcome": column("outcome"),
        "kind": column("error_kind"),
        "phase": column("error_phase"),
        "message": lambda row: text_of(row["error_message"])[:200],
        "log": column("error_log"),
    }
    caption = "Failed runs, with their log files."
    return tabulate(caption, columns, failed, tuple(columns), "results/tables/runs.csv")


def _kinds(failed: pd.DataFrame) -> Table | Paragraph:
    """Return counts of equal failures, each with one message as an example."""
    alike = failed.fillna(dict.fromkeys(_FAILURE, "-")).groupby(_FAILURE)
    counted = alike.agg(runs=("replicate", "size"), message=("error_message", "first"))
    counted = counted.reset_index().sort_values("runs", ascending=False)
    columns: dict[str, Cell] = {
        "method": column("method"),
        "outcome": column("outcome"),
        "kind": column("error_kind"),
        "phase": column("error_phase"),
        "runs": column("runs"),
        "for example": lambda row: text_of(row["message"])[:200],
    }
    caption = "Failed runs by kind; results/tables/runs.csv lists every run."
    text = tuple(name for name in columns if name != "runs")
    return tabulate(caption, columns, counted, text, "results/tables/runs.csv")


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
