"""What the report says, computed from the tables."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpprof.report import measured
from dpprof.report.cells import MAX_ROWS, Cell, column, mention_rest, plural, tabulate, text_of
from dpprof.report.document import Bullets, Document, Paragraph, Section
from dpprof.result import OUTCOMES

Tables = Mapping[str, pd.DataFrame]


def build_document(tables: Tables, captions: Mapping[str, str]) -> Document:
    """Compose the report.

    Args:
        tables: The tables of ``analysis.tables``, by file stem.
        captions: What each figure shows, by its name.
    """
    experiments = tables["experiments"]
    sections = [
        _findings(tables["findings"]),
        measured.results(experiments, captions),
        measured.spread(experiments),
        measured.phases(tables["phases"], experiments),
        measured.owners(tables["components"], experiments),
        measured.code_paths(tables["samplers"]),
        _outcomes(tables["outcomes"], tables["runs"]),
        _missing(tables["missing"]),
        _how(tables["runs"]),
    ]
    return Document(
        title="What differentially private training costs",
        headline=_headline(tables),
        sections=tuple(section for section in sections if section is not None),
    )


def _headline(tables: Tables) -> tuple[str, ...]:
    runs, missing = tables["runs"], tables["missing"]
    ok = int((runs["outcome"] == "ok").sum())
    experiments = runs["experiment_id"].nunique()
    counted = f"{len(runs)} {plural(len(runs), 'run')} of {experiments} "
    said = [f"{counted}{plural(experiments, 'experiment')}: {_success(ok, len(runs))}."]
    failures = [
        f"{count} {outcome}"
        for outcome in OUTCOMES[1:]
        if (count := int((runs["outcome"] == outcome).sum()))
    ]
    if failures:
        said.append(f"Not ok: {', '.join(failures)}; each is listed under Outcomes.")
    if len(missing):
        said.append(
            f"This report is partial: {len(missing)} planned "
            f"{plural(len(missing), 'run has', 'runs have')} no result yet."
        )
    if findings := len(tables["findings"]):
        said.append(f"{findings} {plural(findings, 'finding')} to read first, under Findings.")
    outdated = int((~runs["code_is_current"].astype(bool)).sum())
    if outdated:
        said.append(
            f"{outdated} {plural(outdated, 'run was', 'runs were')} measured by other code than "
            "the present; workflow/scripts/forget.py --outdated, then snakemake, measures again."
        )
    return tuple(said)


def _findings(findings: pd.DataFrame) -> Section | None:
    if findings.empty:
        return None
    columns: dict[str, Cell] = {
        "experiment": lambda row: f"{row['experiment_id']} {row['instrument']}",
        "finding": column("finding"),
    }
    caption = "What to know before believing the numbers."
    source = "results/tables/findings.csv"
    blocks = tabulate(caption, columns, findings, tuple(columns), source)
    return Section(title="Findings", blocks=tuple(blocks))


def _outcomes(outcomes: pd.DataFrame, runs: pd.DataFrame) -> Section:
    columns: dict[str, Cell] = {
        "method": lambda row: row["method"],
        "runs": lambda row: str(row["runs"]),
    }
    for outcome in OUTCOMES:
        columns[outcome] = column(outcome)
    columns["success"] = lambda row: (
        "unknown" if pd.isna(row["success_rate"]) else f"{row['success_rate']:.0%}"
    )
    source = "results/tables/outcomes.csv"
    blocks: list[Any] = tabulate("Outcomes by method.", columns, outcomes, ("method",), source)
    failed = runs[runs["outcome"] != "ok"]
    if len(failed):
        details: dict[str, Cell] = {
            "experiment": lambda row: (
                f"{row['experiment_id']} {row['instrument']} r{row['replicate']}"
            ),
            "outcome": lambda row: row["outcome"],
            "kind": lambda row: text_of(row["error_kind"]),
            "phase": lambda row: text_of(row["error_phase"]),
            "message": lambda row: text_of(row["error_message"])[:200],
            "log": lambda row: text_of(row["error_log"]),
        }
        caption = "What went wrong, and where to read more."
        blocks += tabulate(caption, details, failed, tuple(details), "results/tables/runs.csv")
    again = runs[(runs["attempts"] > 1) & (runs["outcome"] == "ok")]
    if len(again):
        names = ", ".join(sorted(set(again["experiment_id"]))[:MAX_ROWS])
        blocks.append(Paragraph(text=f"Succeeded only at the second attempt: {names}."))
    return Section(title="Outcomes", blocks=tuple(blocks))


def _missing(missing: pd.DataFrame) -> Section | None:
    if missing.empty:
        return None
    listed = missing.head(MAX_ROWS)
    items = [
        f"{row['experiment_id']} {row['instrument']} r{row['replicate']}"
        for _, row in listed.iterrows()
    ]
    rest = mention_rest(len(missing), "results/tables/missing.csv")
    blocks = (Bullets(items=tuple(items)), *rest)
    return Section(title="Missing results", blocks=blocks)


def _how(runs: pd.DataFrame) -> Section:
    facts = [
        ("device", "device_name"),
        ("host", "hostname"),
        ("Python", "python"),
        ("torch", "torch"),
        ("Opacus", "opacus"),
        ("commit", "git_commit"),
    ]
    items = []
    for label, fact in facts:
        values = sorted({str(value) for value in runs[fact].dropna()})
        items.append(f"{label}: {', '.join(values) if values else 'unknown'}")
    if runs["git_dirty"].eq(True).any():
        items.append("some runs were measured with uncommitted changes in the checkout")
    method = (
        "Every run is one fresh process under one instrument. In the instrument clean there is "
        "nothing but the training step and a timer: warm-up steps first, then timed steps whose "
        "raw times are in results/tables/steps.csv; step times come from there alone. The "
        "instrument phases follows the allocator, counts who owns what, and times phases. "
        "Replicates are other processes. What each number means and does not mean is in "
        "docs/methodology.md. All numbers are in the result files, with the full environment "
        "of each run."
    )
    return Section(
        title="How this was measured",
        blocks=(Paragraph(text=method), Paragraph(text=f"Measured with {'; '.join(items)}.")),
    )


def _success(ok: int, total: int) -> str:
    return f"{ok} ok ({ok / total:.0%})" if total else "none has a result"
