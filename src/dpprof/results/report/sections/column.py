"""The columns of tables: how each writes a row."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from dpprof.results.analysis.tables.axes import name_speed, size_cell
from dpprof.results.report.wording import number, percent, reach, significant, span, text_of


class Column(NamedTuple):
    """How a column writes a row, and whether it is set flush right."""

    write: Callable[[Any], str]
    numeric: bool = True


SIZE = Column(size_cell)  # the sizes of samples: tokens, or pixels of an image


def words(write: Callable[[Any], str]) -> Column:
    """Return a column of texts that are made of a row."""
    return Column(write, numeric=False)


def text(name: str) -> Column:
    """Return a column of texts; a dash where there is none."""
    return words(lambda row: text_of(row[name]))


def whole(name: str) -> Column:
    """Return a column of figures as they are."""
    return Column(lambda row: text_of(row[name]))


def amount(name: str, unit: float = 1.0, digits: int = 1) -> Column:
    """Return a column of figures in a unit; a dash where one is unknown."""
    return Column(lambda row: number(row[name], unit, digits))


def three_digits(name: str, unit: float = 1.0) -> Column:
    """Return a column of figures in a unit with three significant digits."""
    return Column(lambda row: significant(row[name], unit))


def share(name: str, digits: int = 0) -> Column:
    """Return a column of shares in percent."""
    return Column(lambda row: percent(row[name], digits))


def speed(frame: pd.DataFrame) -> dict[str, Column]:
    """Return the column of tokens per second, by a name that says what they are."""
    return {name_speed(row for _, row in frame.iterrows()): amount("tokens_per_s", digits=0)}


def between(low: str, high: str, unit: float = 1.0, digits: int = 1) -> Column:
    """Return a column of intervals whose ends are two columns."""
    return Column(lambda row: span(row[low], row[high], unit, digits))


def interval(name: str, write: Callable[[Any], str] = significant) -> Column:
    """Return a column of ranges whose ends are the columns ``<name>_low`` and ``<name>_high``."""
    return Column(lambda row: reach(*(write(row[f"{name}_{end}"]) for end in ("low", "high"))))
