"""What the report says, computed from the tables."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.tables import varying_axes
from dpprof.report.document import Bullets, Document, Paragraph, Picture, Section, Table
from dpprof.result import OUTCOMES

MAX_ROWS = 60
"""A longer table belongs in a CSV; the report says where."""

Tables = Mapping[str, pd.DataFrame]


def build_document(tables: Tables, captions: Mapping[str, str]) -> Document:
    """Compose the report.

    Args:
        tables: The tables of ``analysis.tables``, by file stem.
        captions: What each figure shows, by its name.
    """
    sections = [
        _results(tables["experiments"], captions),
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
    counted = f"{len(runs)} {_plural(len(runs), 'run')} of {experiments} "
    said = [f"{counted}{_plural(experiments, 'experiment')}: {_success(ok, len(runs))}."]
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
            f"{_plural(len(missing), 'run has', 'runs have')} no result yet."
        )
    outdated = int((~runs["code_is_current"].astype(bool)).sum())
    if outdated:
        said.append(
            f"{outdated} {_plural(outdated, 'run was', 'runs were')} measured by other code than "
            "the present; workflow/scripts/forget.py --outdated, then snakemake, measures again."
        )
    return tuple(said)


def _results(experiments: pd.DataFrame, captions: Mapping[str, str]) -> Section:
    ok = experiments[experiments["replicates_ok"] > 0]
    blocks: list[Any] = [Picture(name=name, caption=text) for name, text in captions.items()]
    if ok.empty:
        blocks.append(Paragraph(text="No experiment succeeded, so there is nothing to compare."))
        return Section(title="Results", blocks=tuple(blocks))
    ordered = ok.sort_values(["model", "seq_len", "batch_size", "median_step_s"])
    columns: dict[str, Callable[[Any], str]] = {
        "model": lambda row: row["model"],
        "T": lambda row: str(row["seq_len"]),
        "B": lambda row: str(row["batch_size"]),
        "method": lambda row: row["method"],
        "step (ms)": lambda row: number(row["median_step_s"], 1e-3),
        "min to max": lambda row: (
            f"{number(row['min_step_s'], 1e-3)} to {number(row['max_step_s'], 1e-3)}"
        ),
        "time ratio": lambda row: number(row["step_ratio"], digits=2),
        "tokens/s": lambda row: number(row["tokens_per_s"], digits=0),
        "peak (MiB)": lambda row: number(row["peak_bytes"], 2**20, digits=0),
        "peak ratio": lambda row: number(row["peak_ratio"], digits=2),
        "n": lambda row: f"{row['replicates_ok']:.0f}/{row['replicates']:.0f}",
    }
    varying = varying_axes(ordered, but=("model", "method", "batch_size", "seq_len"))
    columns = {"model": columns.pop("model")} | {name: _column(name) for name in varying} | columns
    kinds = set(ordered["peak_kind"].dropna())
    what = {"allocated": "the allocator's peak", "rss": "the process's resident high-water mark"}
    peak = " or ".join(what[kind] for kind in sorted(kinds))
    caption = (
        "Step time is the median over processes of each process's median; the range is over "
        f"processes. Peak is {peak or 'unknown'}. Ratios are to standard with all else equal. "
        "n counts processes that succeeded."
    )
    if "rss" in kinds:
        caption += (
            " Resident memory includes Python and the libraries, which is most of it for a small "
            "model and more where Opacus is imported."
        )
    table = tabulate(caption, columns, ordered.head(MAX_ROWS), text=("model", "method", *varying))
    blocks.append(table)
    if len(ordered) > MAX_ROWS:
        blocks.append(_rest(len(ordered) - MAX_ROWS, "results/tables/experiments.csv"))
    return Section(title="Results", blocks=tuple(blocks))


def _outcomes(outcomes: pd.DataFrame, runs: pd.DataFrame) -> Section:
    columns: dict[str, Callable[[Any], str]] = {
        "method": lambda row: row["method"],
        "runs": lambda row: str(row["runs"]),
    }
    for outcome in OUTCOMES:
        columns[outcome] = _column(outcome)
    columns["success"] = lambda row: (
        "unknown" if pd.isna(row["success_rate"]) else f"{row['success_rate']:.0%}"
    )
    blocks: list[Any] = [tabulate("Outcomes by method.", columns, outcomes, text=("method",))]
    failed = runs[runs["outcome"] != "ok"]
    if len(failed):
        details: dict[str, Callable[[Any], str]] = {
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
        blocks.append(tabulate(caption, details, failed.head(MAX_ROWS), text=tuple(details)))
        if len(failed) > MAX_ROWS:
            blocks.append(_rest(len(failed) - MAX_ROWS, "results/tables/runs.csv"))
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
    blocks: list[Any] = [Bullets(items=tuple(items))]
    if len(missing) > MAX_ROWS:
        blocks.append(_rest(len(missing) - MAX_ROWS, "results/tables/missing.csv"))
    return Section(title="Missing results", blocks=tuple(blocks))


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
    for label, column in facts:
        values = sorted({str(value) for value in runs[column].dropna()})
        items.append(f"{label}: {', '.join(values) if values else 'unknown'}")
    if runs["git_dirty"].eq(True).any():
        items.append("some runs were measured with uncommitted changes in the checkout")
    method = (
        "Every run is one fresh process with nothing in it but the training step and, for the "
        "instrument clean, a timer: warm-up steps first, then timed steps whose raw times are in "
        "results/tables/steps.csv. Replicates are other processes. Resident memory includes the "
        "interpreter and the libraries; what each number means and does not mean is in "
        "docs/methodology.md. All numbers are in the result files, with the full environment "
        "of each run."
    )
    return Section(
        title="How this was measured",
        blocks=(Paragraph(text=method), Paragraph(text=f"Measured with {'; '.join(items)}.")),
    )


def _column(name: str) -> Callable[[Any], str]:
    return lambda row: str(row[name])


def tabulate(
    caption: str,
    columns: Mapping[str, Callable[[Any], str]],
    frame: pd.DataFrame,
    text: tuple[str, ...],
) -> Table:
    """Format a frame's rows; columns not named in ``text`` are set flush right."""
    rows = [tuple(cell(row) for cell in columns.values()) for _, row in frame.iterrows()]
    return Table(
        caption=caption,
        header=tuple(columns),
        rows=tuple(rows),
        numeric=tuple(name not in text for name in columns),
    )


def number(value: float | None, unit: float = 1.0, digits: int = 1) -> str:
    """Write a figure in a unit; a dash where it is unknown."""
    return "-" if value is None or pd.isna(value) else f"{value / unit:,.{digits}f}"


def text_of(value: Any) -> str:
    """Write a text; a dash where there is none."""
    return "-" if value is None or pd.isna(value) else str(value)


def _rest(count: int, path: str) -> Paragraph:
    return Paragraph(text=f"{count:,} more are in {path}.")


def _plural(count: int, one: str, many: str | None = None) -> str:
    return one if count == 1 else many or f"{one}s"


def _success(ok: int, total: int) -> str:
    return f"{ok} ok ({ok / total:.0%})" if total else "none has a result"
