"""Tables as CSV text that no spreadsheet runs, and back.

A text that would be read as a formula gets an apostrophe in front, as OWASP advises; so does one
that has apostrophes and then such a beginning, so that the text can be had back. csvCell in the
page's elements.js does the same.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from dpprof.analysis.table_columns import TABLES

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def write_rows(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows of cells as lines of CSV; None is an empty cell."""
    text = _Lines()
    csv.writer(text).writerows([_protect(cell) for cell in row] for row in rows)
    return text.getvalue()


def write_frame(table: str, frame: pd.DataFrame) -> str:
    """Return a table's frame as CSV."""
    text = _Lines()
    _change_texts(table, frame, _protect).to_csv(text, index=False, lineterminator="\r\n")
    return text.getvalue()


def restore_texts(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table's frame that was read from CSV with its texts as they were."""
    return _change_texts(table, frame, _restore)


def texts_of(table: str) -> list[str]:
    """List the columns of a table that are declared as texts; none of a table that is not."""
    declared = TABLES[table].columns.values() if table in TABLES else ()
    return [column.name for column in declared if column.kind == "text"]


class _Lines(io.StringIO):
    """Ends lines in a line feed alone.

    The csv module quotes a cell with a carriage return, which readers take for the end of a line,
    only if lines end in one.
    """

    def write(self, line: str) -> int:
        return super().write(line.removesuffix("\r\n") + "\n")


def _change_texts(table: str, frame: pd.DataFrame, change: Callable[[Any], Any]) -> pd.DataFrame:
    changed = {}
    for name in frame.columns.intersection(texts_of(table)):
        others = {old: new for old in frame[name].unique() if (new := change(old)) is not old}
        changed[name] = frame[name].replace(others)
    return frame.assign(**changed)


def _protect(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def _restore(cell: Any) -> Any:
    quoted = isinstance(cell, str) and cell.startswith("'") and _FORMULA.match(cell)
    return cell[1:] if quoted else cell
