"""The report that puts two sweeps side by side, in the words of ``dpprof compare``."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from dpprof.experiments.config.validation import InputError, explain
from dpprof.experiments.records.comparison import FolderComparison
from dpprof.results.report.comparison import (
    HEADER,
    Row,
    list_changes,
    list_remarks,
    summarise,
)
from dpprof.results.report.rendering.document import Bullets, Document, Paragraph, Section, Table

_NUMERIC = (False, False, False, True, True, True, False)


def compare_sweeps(comparison: FolderComparison, folders: Sequence[Path]) -> Document:
    """Return what changed from one sweep to another, after the answer of each.

    Args:
        comparison: The comparison of both folders.
        folders: The folders of results; the answer of a report that is there is quoted.

    Raises:
        InputError: A ``report.json`` is not one that this version writes.
    """
    answers = filter(None, map(_quote, folders))
    changes = (
        Section(title=heading, blocks=(_tabulate(heading, rows, left_out),))
        for heading, rows, left_out in list_changes(comparison)
    )
    compared = Bullets(items=tuple(list_remarks(comparison)))
    return Document(
        title="Two sweeps side by side",
        question=f"What differs from {comparison.baseline} to {comparison.candidate}?",
        headline=(summarise(comparison),),
        sections=(*answers, *changes, Section(title="What was compared", blocks=(compared,))),
    )


def _quote(folder: Path) -> Section | None:
    """Return the question, the answer and the first table of a folder's report, if it has one."""
    path = folder / "report.json"
    if not path.is_file():
        return None
    try:
        told = Document.model_validate_json(path.read_bytes())
    except ValidationError as error:
        why = explain(error, Document)
        raise InputError(f"{path}: is no report of this version ({why}); run snakemake") from None
    said = [Paragraph(text=text) for text in (told.question, *told.headline) if text]
    blocks = told.sections[0].blocks if told.sections else ()
    tables = [block for block in blocks if isinstance(block, Table)]
    return Section(title=f"The answer of {folder}", blocks=(*said, *tables))


def _tabulate(heading: str, rows: Sequence[Row], left_out: str) -> Table:
    """Return figures that were judged alike, each with what else is to know of it."""
    caption = f"{heading}, the largest changes first{f'; {left_out}' if left_out else ''}."
    cells = tuple((*row.cells, row.note or "") for row in rows)
    return Table(caption=caption, header=(*HEADER, "remark"), rows=cells, numeric=_NUMERIC)
