"""The section on verification, and the signs that mark methods in other sections."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pandas as pd

from dpprof.experiments.records.verdict import TOLERANCE
from dpprof.results.analysis.standings import (
    DAGGER,
    DOUBLE_DAGGER,
    Marks,
    methods_by_hole,
    name_other_mechanisms,
    name_unverified,
    sign,
)
from dpprof.results.analysis.tables.axes import BASELINE
from dpprof.results.figures.style import MEANINGS
from dpprof.results.report.rendering.document import (
    Blocks,
    Bullets,
    Document,
    Paragraph,
    Picture,
    Section,
    Table,
)
from dpprof.results.report.sections.tables import formatted, tabulate, text, words
from dpprof.results.report.wording import plural, text_of

TITLE = "Do the methods compute the same gradient?"

_NOTES = {symbol: f"{symbol} {meaning}, see: {TITLE}" for symbol, meaning in MEANINGS.items()}

_VERDICTS: Mapping[Any, str] = {True: "verified", False: "failed"}


def tell_verification(verification: pd.DataFrame) -> Blocks:
    """Return the error of each method's gradient against the reference, and lost guarantees.

    The result is empty without methods.
    """
    named = ("model", "attention")
    columns = {name: text(name) for name in named if len(set(verification[name])) > 1}
    columns |= {
        "method": text("method"),
        "mechanism": text("mechanism"),
        "clips": words(_clips),
        "error of gradients": formatted("max_relative_error", ".1e"),
        "of norms": formatted("max_relative_error_of_norms", ".1e"),
        "reference": text("reference"),
        "verdict": words(lambda row: _VERDICTS.get(row["verified"], "not verified")),
    }
    if name_unverified(verification):
        columns["why"] = words(lambda row: text_of(row["reason"])[:200])
    caption = (
        "The largest relative errors of clipped gradients, and of per-sample norms where a method "
        "stores them. Verification uses float64, no noise, a small model of the same layers, every "
        "variant of attention, and batches of 1 and 4 with some samples clipped and some not. "
        f"Errors within {TOLERANCE:.0e} count as rounding. A method without clipping is compared "
        "with the mean gradient, a method that clips in groups with a reference that clips the "
        "same groups."
    )
    table = tabulate(caption, columns, verification, "verification.csv")
    return [*table, *_tell_holes(verification)]


def _tell_holes(verification: pd.DataFrame) -> Blocks:
    """Return where guarantees were lost; nothing where none was."""
    holes = methods_by_hole(verification)
    if not holes:
        return []
    said = (
        "A correct gradient alone does not guarantee privacy. Verification also tries parameters "
        "frozen and a layer thawed after set-up, a non-finite sample, an empty batch and gradients "
        "that were not cleared. A method may refuse these. The following methods continued with a "
        "result that differs from the definition:"
    )
    items = tuple(f"{hole} ({', '.join(methods)})" for hole, methods in holes.items())
    return [Paragraph(text=said), Bullets(items=items)]


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
    unverified = name_unverified(verification)
    baseline = f" ({BASELINE} included)" if BASELINE in set(verification["method"]) else ""
    failed = set(verification.loc[verification["verified"].eq(False), "method"])
    said = (
        f"The gradients of {total - len(unverified):,} of {total:,} {plural(total, 'method')}"
        f"{baseline} were verified to be right"
    )
    for what, names in (("failed", failed), ("not verified", unverified.keys() - failed)):
        said += f"; {what}: {', '.join(sorted(names))}" if names else ""
    told = [f"{said}; marked {DAGGER}." if unverified else f"{said}."]
    if others := sorted(name_other_mechanisms(verification)):
        told.append(
            f"Other mechanisms than flat clipping: {', '.join(others)}; marked {DOUBLE_DAGGER}."
        )
    return told


def mark_methods(document: Document, marks: Marks, but: Collection[str] = (TITLE,)) -> Document:
    """Return the report with signs after methods' names, in the answer, in tables and in lists.

    The sections whose titles are in ``but`` stay as they are.
    """
    names = {name for methods in marks.values() for name in methods}
    if not names:
        return document
    # The longest first, because a method's name may begin with another's.
    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w-])({either})(?![\w-])")

    def mark(sections: Iterable[Section]) -> tuple[Section, ...]:
        return tuple(
            section
            if section.title in but
            else section.model_copy(
                update={"blocks": tuple(_mark(block, pattern, marks) for block in section.blocks)}
            )
            for section in sections
        )

    headline = tuple(_sign(sentence, pattern, marks) for sentence in document.headline)
    marked = {"sections": mark(document.sections), "appendix": mark(document.appendix)}
    return document.model_copy(update={"headline": headline, **marked})


def _sign(text: str, pattern: re.Pattern[str], marks: Marks) -> str:
    return pattern.sub(lambda name: name[0] + sign(name[0], marks), text)


def _mark(
    block: Paragraph | Bullets | Table | Picture, pattern: re.Pattern[str], marks: Marks
) -> Paragraph | Bullets | Table | Picture:
    if isinstance(block, Bullets):
        items = tuple(_sign(item, pattern, marks) for item in block.items)
        return block.model_copy(update={"items": items})
    if isinstance(block, Picture):
        return block.model_copy(update={"said": _sign(block.said, pattern, marks)})
    if not isinstance(block, Table) or "method" not in block.header:
        return block
    column = block.header.index("method")
    names = {row[column] for row in block.rows}
    notes = [note for mark, note in _NOTES.items() if names.intersection(marks.get(mark, ()))]
    if not notes:
        return block
    rows = tuple(
        (*row[:column], f"{row[column]}{sign(row[column], marks)}", *row[column + 1 :])
        for row in block.rows
    )
    caption = " ".join([block.caption, *notes])
    return block.model_copy(update={"rows": rows, "caption": caption})
