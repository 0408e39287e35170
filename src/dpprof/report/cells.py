"""Text for the cells of a table, and the columns that name its experiments."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.tables.axes import name_model
from dpprof.analysis.tables.frames import naming_axes
from dpprof.report.document import Paragraph, Table

Cell = Callable[[Any], str]
Told = list[Table | Paragraph]

MAX_ROWS = 60
"""For a longer table the report names the CSV instead."""

ORDER = ["model", "seq_len", "batch_size"]
"""The columns by which rows are sorted."""


def column(name: str) -> Cell:
    """Return a cell writer that writes a column as it is; a dash where it is unknown."""
    return lambda row: text_of(row[name])


def amount(name: str, unit: float = 1.0, digits: int = 1) -> Cell:
    """Return a cell writer that writes a column's figures in a unit."""
    return lambda row: number(row[name], unit, digits)


def name_experiments(rows: pd.DataFrame) -> dict[str, Cell]:
    """Return the columns that name an experiment: the model, and the axes that tell rows apart."""
    axes = naming_axes(rows, but=("model", "method", "batch_size", "seq_len"))
    named = {name: name for name in axes}
    named |= {"T": "seq_len", "B": "batch_size", "method": "method"}
    cells = {heading: column(name) for heading, name in named.items()}
    return {"model": name_model, **cells}


def texts(naming: Mapping[str, Cell]) -> tuple[str, ...]:
    """Return the naming columns that are not numbers."""
    return tuple(name for name in naming if name not in ("T", "B"))


def tabulate(
    caption: str,
    columns: Mapping[str, Cell],
    frame: pd.DataFrame,
    text: tuple[str, ...],
    source: str,
) -> Table | Paragraph:
    """Return a frame as a table of texts; columns not named in ``text`` are set flush right.

    Beyond ``MAX_ROWS`` rows the result only names ``source``, the CSV that holds the rows.
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
    """Return a figure in a unit; a dash where it is unknown."""
    return "-" if value is None or pd.isna(value) else f"{value / unit:,.{digits}f}"


def significant(value: float | None, unit: float = 1.0) -> str:
    """Return a figure in a unit with three significant digits; a dash where it is unknown."""
    if value is None or pd.isna(value) or not value:
        return number(value, unit, 0)
    return number(value, unit, max(0, 2 - math.floor(math.log10(abs(value) / unit))))


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share in percent; a dash where it is unknown."""
    return "-" if value is None or pd.isna(value) else f"{value:.{digits}%}"


def span(low: float | None, high: float | None, unit: float = 1.0, digits: int = 1) -> str:
    """Return an interval in a unit; a dash where it is unknown."""
    if pd.isna(low) or pd.isna(high):
        return "-"
    return f"{number(low, unit, digits)} to {number(high, unit, digits)}"


def text_of(value: Any) -> str:
    """Return a text; a dash where there is none."""
    return "-" if value is None or pd.isna(value) else str(value)


def listed(names: Iterable[object]) -> str:
    """Return names as words: a, b and c."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return the form of a word that goes with a count."""
    return one if count == 1 else many or f"{one}s"
