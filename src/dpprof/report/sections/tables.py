"""Text for the cells of a table, and the columns that name its experiments."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.tables.axes import name_model
from dpprof.analysis.tables.frames import naming_axes
from dpprof.report.rendering.document import Paragraph, Table
from dpprof.report.wording import number, text_of

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
