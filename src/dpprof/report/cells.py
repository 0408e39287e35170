"""From figures to the texts in a table's cells."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from dpprof.report.document import Paragraph, Table

Cell = Callable[[Any], str]

MAX_ROWS = 60
"""A longer table belongs in a CSV; the report says where."""


def column(name: str) -> Cell:
    """Write a column as it is."""
    return lambda row: str(row[name])


def amount(name: str, unit: float = 1.0, digits: int = 1) -> Cell:
    """Write a column's figures in a unit."""
    return lambda row: number(row[name], unit, digits)


def tabulate(
    caption: str,
    columns: Mapping[str, Cell],
    frame: pd.DataFrame,
    text: tuple[str, ...],
    source: str,
) -> Table | Paragraph:
    """Format a frame's rows; columns not named in ``text`` are set flush right.

    Args:
        caption: What the table shows.
        columns: From a heading to what writes its cell of a row.
        frame: The rows; if they are more than ``MAX_ROWS``, only where they are is said.
        text: The headings of columns of text.
        source: The CSV that holds the rows.
    """
    if len(frame) > MAX_ROWS:
        return Paragraph(text=f"{caption} These are {len(frame):,} rows: see {source}.")
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


def significant(value: float | None, unit: float = 1.0) -> str:
    """Write a figure in a unit with three digits that count; a dash where it is unknown."""
    if value is None or pd.isna(value) or not value:
        return number(value, unit, 0)
    return number(value, unit, max(0, 2 - math.floor(math.log10(abs(value) / unit))))


def percent(value: float | None, digits: int = 0) -> str:
    """Write a share; a dash where it is unknown."""
    return "-" if value is None or pd.isna(value) else f"{value:.{digits}%}"


def span(low: float | None, high: float | None, unit: float = 1.0, digits: int = 1) -> str:
    """Write an interval in a unit; a dash where it is unknown."""
    if pd.isna(low) or pd.isna(high):
        return "-"
    return f"{number(low, unit, digits)} to {number(high, unit, digits)}"


def text_of(value: Any) -> str:
    """Write a text; a dash where there is none."""
    return "-" if value is None or pd.isna(value) else str(value)


def plural(count: int, one: str, many: str | None = None) -> str:
    """Choose the form of a word that goes with a count."""
    return one if count == 1 else many or f"{one}s"
