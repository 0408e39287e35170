"""Blocks of a section: tables of texts, lists and paragraphs."""

from collections.abc import Iterable, Mapping

import pandas as pd

from dpprof.results.analysis.tables.axes import name_model
from dpprof.results.analysis.tables.frames import naming_axes
from dpprof.results.report.rendering.document import Blocks, Bullets, Paragraph, Table
from dpprof.results.report.sections import column
from dpprof.results.report.sections.column import Column

MAX_ROWS = 60  # the most rows of a table; instead of a longer one the report names the CSV
_ORDER = ("model", "seq_len", "batch_size")  # the columns by which rows are sorted first


def tabulate_experiments(
    caption: str,
    columns: dict[str, Column],
    frame: pd.DataFrame,
    source: str,
    *,
    by: str = "method",
    first: Iterable[str] = (),
) -> Blocks:
    """Return a table of experiments, beginning with the columns that name them.

    Rows are sorted by ``first``, then by model, length and batch, then by ``by``; otherwise as
    ``tabulate``.
    """
    if frame.empty:
        return []
    axes = naming_axes(frame, but=("model", "method", "batch_size", "seq_len", "image_size"))
    naming = {
        "model": column.words(name_model),
        **{axis: column.text(axis) for axis in axes},
        "T": column.SIZE,
        "B": column.whole("batch_size"),
        "method": column.text("method"),
    }
    return tabulate(caption, naming | columns, frame.sort_values([*first, *_ORDER, by]), source)


def tabulate(
    caption: str, columns: Mapping[str, Column], frame: pd.DataFrame, source: str
) -> Blocks:
    """Return a frame as a table of texts; nothing without rows.

    Beyond ``MAX_ROWS`` rows the result only names ``source``, the CSV that holds the rows.
    """
    if frame.empty:
        return []
    if len(frame) > MAX_ROWS:
        where = f"see results/tables/{source}"
        return [Paragraph(text=f"{caption} These are {len(frame):,} rows: {where}.")]
    rows = [tuple(each.write(row) for each in columns.values()) for _, row in frame.iterrows()]
    numeric = tuple(each.numeric for each in columns.values())
    return [Table(caption=caption, header=tuple(columns), rows=tuple(rows), numeric=numeric)]


def list_items(items: Iterable[str]) -> Blocks:
    """Return texts as a list; nothing without any."""
    listed = tuple(items)
    return [Bullets(items=listed)] if listed else []


def paragraph(*sentences: str) -> Blocks:
    """Return sentences as a paragraph; nothing without any."""
    return [Paragraph(text=" ".join(sentences))] if sentences else []
