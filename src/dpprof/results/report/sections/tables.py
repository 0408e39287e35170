"""Tables of texts, and the columns that name their experiments."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from dpprof.results.analysis.tables.axes import name_model, name_speed, size_cell
from dpprof.results.analysis.tables.frames import naming_axes
from dpprof.results.report.rendering.document import Blocks, Paragraph, Table
from dpprof.results.report.wording import number, percent, reach, significant, span, text_of

MAX_ROWS = 60
"""The most rows of a table; instead of a longer one the report names the CSV."""

_ORDER = ("model", "seq_len", "batch_size")
"""The columns by which rows are sorted first."""


class Column(NamedTuple):
    """How a column writes a row, and whether it is set flush right."""

    write: Callable[[Any], str]
    numeric: bool = True


def text(name: str, spaced: bool = False) -> Column:
    """Return a column of texts; a dash where there is none, ``spaced`` without underscores."""
    change = (lambda value: value.replace("_", " ")) if spaced else str
    return Column(lambda row: change(text_of(row[name])), numeric=False)


def words(write: Callable[[Any], str]) -> Column:
    """Return a column of texts that are made of a row."""
    return Column(write, numeric=False)


def amount(name: str, unit: float = 1.0, digits: int = 1) -> Column:
    """Return a column of figures in a unit; a dash where one is unknown."""
    return Column(lambda row: number(row[name], unit, digits))


def whole(name: str) -> Column:
    """Return a column of figures as they are."""
    return Column(lambda row: text_of(row[name]))


def sizes() -> Column:
    """Return a column of the sizes of samples: tokens, or pixels of an image."""
    return Column(size_cell)


def speed(frame: pd.DataFrame) -> dict[str, Column]:
    """Return the column of tokens per second, by a name that says what they are."""
    return {name_speed(row for _, row in frame.iterrows()): amount("tokens_per_s", digits=0)}


def three_digits(name: str, unit: float = 1.0) -> Column:
    """Return a column of figures in a unit with three significant digits."""
    return Column(lambda row: significant(row[name], unit))


def formatted(name: str, form: str) -> Column:
    """Return a column of figures in a format of Python; a dash where one is unknown."""
    return Column(lambda row: "-" if pd.isna(row[name]) else format(row[name], form))


def share(name: str, digits: int = 0) -> Column:
    """Return a column of shares in percent."""
    return Column(lambda row: percent(row[name], digits))


def between(low: str, high: str, unit: float = 1.0, digits: int = 1) -> Column:
    """Return a column of intervals whose ends are two columns."""
    return Column(lambda row: span(row[low], row[high], unit, digits))


def interval(name: str, write: Callable[[Any], str] = significant) -> Column:
    """Return a column of ranges whose ends are the columns ``<name>_low`` and ``<name>_high``."""
    return Column(lambda row: reach(*(write(row[f"{name}_{end}"]) for end in ("low", "high"))))


def tabulate_experiments(
    caption: str,
    columns: dict[str, Column],
    frame: pd.DataFrame,
    source: str,
    *,
    by: Iterable[str] = ("method",),
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
        "model": words(name_model),
        **{axis: text(axis) for axis in axes},
        "T": sizes(),
        "B": whole("batch_size"),
        "method": text("method"),
    }
    rows = frame.sort_values([*first, *_ORDER, *by])
    return tabulate(caption, naming | columns, rows, source)


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
    rows = [tuple(column.write(row) for column in columns.values()) for _, row in frame.iterrows()]
    numeric = tuple(column.numeric for column in columns.values())
    return [Table(caption=caption, header=tuple(columns), rows=tuple(rows), numeric=numeric)]
