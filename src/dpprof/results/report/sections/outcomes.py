"""The sections on how runs ended, on caveats, on missing runs, and on verdicts with their signs."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pandas as pd

from dpprof.experiments.records.terms import OUTCOMES
from dpprof.experiments.records.verdict import TOLERANCE
from dpprof.results.analysis.standings import (
    DAGGER,
    DOUBLE_DAGGER,
    Marks,
    find_marks,
    methods_by_hole,
    sign,
)
from dpprof.results.analysis.tables.axes import BASELINE
from dpprof.results.figures.style import MEANINGS as SIGNS
from dpprof.results.report.rendering.document import AnyBlock, Blocks, Document, Section
from dpprof.results.report.sections import column
from dpprof.results.report.sections.column import Column
from dpprof.results.report.sections.tables import MAX_ROWS, list_items, paragraph, tabulate
from dpprof.results.report.wording import percent, text_of
from dpprof.system.words import plural

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

VERIFICATION = "Do the methods compute the same gradient?"

_NOTES = {symbol: f"{symbol} {meaning}, see: {VERIFICATION}" for symbol, meaning in SIGNS.items()}
_VERDICTS: Mapping[Any, str] = {True: "verified", False: "failed"}
_MESSAGE_LETTERS = 200


def tell_caveats(findings: pd.DataFrame) -> Blocks:
    """Return every finding; the first page counts them by kind."""
    columns = {
        "experiment": column.words(lambda row: f"{row['experiment_id']} {row['instrument']}"),
        "caveat": column.text("finding"),
    }
    return tabulate("Read these caveats before the numbers.", columns, findings, "findings.csv")


def tell_outcomes(outcomes: pd.DataFrame, runs: pd.DataFrame) -> Blocks:
    """Return outcome counts by method, then every failure, or the kinds of failures if many."""
    columns = {"method": column.text("method"), "runs": column.whole("runs")}
    columns |= {outcome: column.whole(outcome) for outcome in OUTCOMES}
    columns["success"] = Column(
        lambda row: "unknown" if pd.isna(row["success_rate"]) else percent(row["success_rate"])
    )
    blocks = tabulate("Outcomes by method.", columns, outcomes, "outcomes.csv")
    blocks += _tell_failures(runs[runs["outcome"] != "ok"])
    again = runs[(runs["attempts"] > 1) & (runs["outcome"] == "ok")]
    if len(again):
        names = sorted(set(again["experiment_id"]))
        told = ", ".join(names) if len(names) <= MAX_ROWS else f"{len(names):,} experiments"
        blocks += paragraph(f"These succeeded only at the second attempt: {told}.")
    return blocks


def _tell_failures(failed: pd.DataFrame) -> Blocks:
    """Return failures, or counts of equal ones, each with one message as an example."""
    kind = {
        "outcome": column.text("outcome"),
        "kind": column.text("error_kind"),
        "phase": column.text("error_phase"),
    }
    message = _cut("error_message")
    if len(failed) <= MAX_ROWS:
        columns = {"experiment": column.words(_name_run), **kind, "message": message}
        columns["log"] = column.text("error_log")
        return tabulate("Failed runs, with their log files.", columns, failed, "runs.csv")
    alike = ["method", "outcome", "error_kind", "error_phase"]
    counted = (
        failed.fillna(dict.fromkeys(alike, "-"))
        .groupby(alike)
        .agg(runs=("replicate", "size"), error_message=("error_message", "first"))
        .reset_index()
        .sort_values("runs", ascending=False)
    )
    columns = {"method": column.text("method"), **kind, "runs": column.whole("runs")}
    columns["for example"] = message
    caption = "Failed runs by kind; results/tables/runs.csv lists every run."
    return tabulate(caption, columns, counted, "runs.csv")


def _name_run(row: Any) -> str:
    return f"{row['experiment_id']} {row['instrument']} r{row['replicate']}"


def _cut(name: str) -> Column:
    return column.words(lambda row: text_of(row[name])[:_MESSAGE_LETTERS])


def tell_missing(missing: pd.DataFrame) -> Blocks:
    """Return the runs without a result, or their counts by method if many."""
    if len(missing) <= MAX_ROWS:
        return list_items(f"{_name_run(row)}: {row['reason']}" for _, row in missing.iterrows())
    counts = missing["method"].value_counts()
    items = [f"{method}: {count:,}" for method, count in counts.items()]
    return list_items([*items, "results/tables/missing.csv lists every run."])


def tell_verification(verification: pd.DataFrame) -> Blocks:
    """Return the error of each method's gradient against the reference, and lost guarantees.

    The result is empty without methods.
    """
    named = ("model", "attention")
    columns = {name: column.text(name) for name in named if len(set(verification[name])) > 1}
    columns |= {
        "method": column.text("method"),
        "mechanism": column.text("mechanism"),
        "clips": column.words(_clips),
        "error of gradients": _error("max_relative_error"),
        "of norms": _error("max_relative_error_of_norms"),
        "reference": column.text("reference"),
        "verdict": column.words(lambda row: _VERDICTS.get(row["verified"], "not verified")),
    }
    if find_marks(verification)[DAGGER]:
        columns["why"] = _cut("reason")
    caption = (
        "The largest relative errors of clipped gradients, and of per-sample norms where a method "
        "stores them. Verification uses float64, no noise, a small model of the same layers, every "
        "variant of attention, and batches of 1 and 4 with some samples clipped and some not. "
        f"Errors within {TOLERANCE:.0e} count as rounding. A method without clipping is compared "
        "with the mean gradient, a method that clips in groups with a reference that clips the "
        "same groups."
    )
    table = tabulate(caption, columns, verification, "verification.csv")
    holes = methods_by_hole(verification)
    if not holes:
        return table
    said = (
        "A correct gradient alone does not guarantee privacy. Verification also tries parameters "
        "frozen and a layer thawed after set-up, a non-finite sample, an empty batch and gradients "
        "that were not cleared. A method may refuse these. The following methods continued with a "
        "result that differs from the definition:"
    )
    items = [f"{hole} ({', '.join(methods)})" for hole, methods in holes.items()]
    return [*table, *paragraph(said), *list_items(items)]


def _error(name: str) -> Column:
    return Column(lambda row: "-" if pd.isna(row[name]) else f"{row[name]:.1e}")


def _clips(row: Any) -> str:
    """Return what is clipped together, and how far one sample can move the sum if not by C."""
    if pd.isna(row["groups"]):
        return "-"
    groups, share = int(row["groups"]), row["sensitivity"]
    if groups == 0:
        return "nothing"
    what = "all as one" if groups == 1 else f"{groups} groups"
    return what if abs(share - 1) <= TOLERANCE else f"{what}, to {share:.2f} C in all"


def count_verified(verification: pd.DataFrame) -> list[str]:
    """Return sentences on how many methods are verified, which are not, and which differ."""
    total = verification["method"].nunique()
    if not total:
        return []
    unverified, others = map(set, find_marks(verification).values())
    baseline = f" ({BASELINE} included)" if BASELINE in set(verification["method"]) else ""
    failed = set(verification.loc[verification["verified"].eq(False), "method"])
    said = (
        f"The gradients of {total - len(unverified):,} of {total:,} {plural(total, 'method')}"
        f"{baseline} were verified to be right"
    )
    for what, names in (("failed", failed), ("not verified", unverified - failed)):
        said += f"; {what}: {', '.join(sorted(names))}" if names else ""
    told = [f"{said}; marked {DAGGER}." if unverified else f"{said}."]
    if others:
        named = ", ".join(sorted(others))
        told.append(f"Other mechanisms than flat clipping: {named}; marked {DOUBLE_DAGGER}.")
    return told


def mark_methods(document: Document, marks: Marks, but: Collection[str]) -> Document:
    """Return the report with signs after methods' names, in the answer, in tables and in lists.

    The sections whose titles are in ``but`` stay as they are.
    """
    names = {name for methods in marks.values() for name in methods}
    if not names:
        return document
    # The longest first, because a method's name may begin with another's.
    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w-])({either})(?![\w-])")

    def mark(text: str) -> str:
        return pattern.sub(lambda name: name[0] + sign(name[0], marks), text)

    def mark_all(sections: Iterable[Section]) -> tuple[Section, ...]:
        return tuple(
            section
            if section.title in but
            else section.model_copy(
                update={"blocks": tuple(_mark(block, mark, marks) for block in section.blocks)}
            )
            for section in sections
        )

    return document.model_copy(
        update={
            "headline": tuple(map(mark, document.headline)),
            "sections": mark_all(document.sections),
            "appendix": mark_all(document.appendix),
        }
    )


def _mark(block: AnyBlock, mark: Callable[[str], str], marks: Marks) -> AnyBlock:
    if block.kind == "bullets":
        return block.model_copy(update={"items": tuple(map(mark, block.items))})
    if block.kind == "picture":
        return block.model_copy(update={"said": mark(block.said)})
    if block.kind != "table" or "method" not in block.header:
        return block
    at = block.header.index("method")
    names = {row[at] for row in block.rows}
    notes = [note for symbol, note in _NOTES.items() if names.intersection(marks.get(symbol, ()))]
    if not notes:
        return block
    rows = tuple(
        (*row[:at], f"{row[at]}{sign(row[at], marks)}", *row[at + 1 :]) for row in block.rows
    )
    caption = " ".join([block.caption, *notes])
    return block.model_copy(update={"rows": rows, "caption": caption})
