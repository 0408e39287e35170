"""What is known of the methods' gradients: told in a section, and marked everywhere else."""

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.verified import DAGGER, name_unverified
from dpprof.report.cells import Cell, column, plural, tabulate, text_of
from dpprof.report.document import Bullets, Document, Paragraph, Picture, Table
from dpprof.verdict import TOLERANCE

TITLE = "Do the methods compute the same gradient?"

_VERDICTS: Mapping[Any, str] = {True: "verified", False: "failed"}


def tell_verification(verification: pd.DataFrame) -> list[Table | Paragraph]:
    """Say how far each method's gradient is from the reference's; nothing without methods.

    Args:
        verification: The table ``verification``.
    """
    if verification.empty:
        return []
    named = ["model", "attention"]
    columns: dict[str, Cell] = {
        name: column(name) for name in named if len(set(verification[name])) > 1
    }
    columns |= {
        "method": column("method"),
        "clips": _clips,
        "error of gradients": _error("max_relative_error"),
        "of norms": _error("max_relative_error_of_norms"),
        "reference": lambda row: text_of(row["reference"]),
        "verdict": lambda row: _VERDICTS.get(row["verified"], "not verified"),
    }
    if name_unverified(verification):
        columns["why"] = lambda row: text_of(row["reason"])[:200]
    caption = (
        "The largest relative errors of clipped gradients, and of the samples' norms where a "
        "method keeps them: in float64 without noise, on a small model of the same layers, with "
        "every variant of attention and batches of 1 and 4, some samples clipped and some not. "
        f"What is within {TOLERANCE:.0e} is put down to rounding. A method that clips nothing is "
        "compared with the mean gradient, one that clips in groups with the same groups."
    )
    text = tuple(name for name in columns if name not in ("error of gradients", "of norms"))
    return [tabulate(caption, columns, verification, text, "results/tables/verification.csv")]


def _error(name: str) -> Cell:
    return lambda row: "-" if pd.isna(row[name]) else f"{row[name]:.1e}"


def _clips(row: Any) -> str:
    """Say what is clipped together; and how far the sum can move, if not as by one bound C."""
    if pd.isna(row["groups"]):
        return "-"
    groups, share = int(row["groups"]), row["sensitivity"]
    if groups == 0:
        return "nothing"
    what = "all as one" if groups == 1 else f"{groups} groups"
    return what if abs(share - 1) <= TOLERANCE else f"{what}, to {share:.2f} C in all"


def count_verified(verification: pd.DataFrame) -> list[str]:
    """Say in one sentence how many methods are verified, and which are not."""
    total = verification["method"].nunique()
    if not total:
        return []
    unverified = name_unverified(verification)
    failed = set(verification.loc[verification["verified"].eq(False), "method"])
    said = (
        f"{total - len(unverified):,} of {total:,} {plural(total, 'method')} verified to compute "
        "the reference's gradient"
    )
    for what, names in (("failed", failed), ("not verified", unverified.keys() - failed)):
        said += f"; {what}: {', '.join(sorted(names))}" if names else ""
    return [f"{said}; marked {DAGGER}." if unverified else f"{said}."]


def mark_unverified(document: Document, unverified: Mapping[str, str]) -> Document:
    """Put a dagger behind methods that are not verified, in tables and in what was found.

    Args:
        document: The report; the section that tells the verdicts is left as it is.
        unverified: From methods to reasons.
    """
    if not unverified:
        return document
    # The longest first: a method's name may begin with another's.
    names = "|".join(map(re.escape, sorted(unverified, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w-])({names})(?![\w-])")
    sections = (
        section
        if section.title == TITLE
        else section.model_copy(
            update={"blocks": tuple(_mark(block, pattern) for block in section.blocks)}
        )
        for section in document.sections
    )
    return document.model_copy(update={"sections": tuple(sections)})


def _mark(
    block: Paragraph | Bullets | Table | Picture, pattern: re.Pattern[str]
) -> Paragraph | Bullets | Table | Picture:
    if isinstance(block, Bullets):
        items = tuple(pattern.sub(rf"\1{DAGGER}", item) for item in block.items)
        return block.model_copy(update={"items": items})
    if not isinstance(block, Table) or "method" not in block.header:
        return block
    at = block.header.index("method")
    cells = [row[at] for row in block.rows]
    if not any(pattern.fullmatch(cell) for cell in cells):
        return block
    rows = tuple(
        (*row[:at], f"{row[at]}{DAGGER}" if pattern.fullmatch(row[at]) else row[at], *row[at + 1 :])
        for row in block.rows
    )
    note = f"{DAGGER} Not verified, see: {TITLE}"
    return block.model_copy(update={"rows": rows, "caption": f"{block.caption} {note}"})
