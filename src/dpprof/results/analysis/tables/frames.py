"""Tables as data frames and as CSV files, each with a checksum by which an edited file is found.

No spreadsheet runs a text of these files: a text that would be read as a formula gets an apostrophe
in front, as OWASP advises. So does one that has apostrophes and then such a beginning, so that the
text can be restored. csvCell in the page's elements.js does the same.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from dpprof.experiments.config.validation import InputError
from dpprof.results.analysis.tables.axes import AXES, RUN_KEY, name_model
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.system.files import write_atomically

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_PROTECTED = re.compile(f"'{_FORMULA.pattern}")


def write_frame(table: str, frame: pd.DataFrame, *, header: bool = True) -> str:
    """Return a table's frame as CSV."""
    text, protected = _Lines(), _change_texts(table, frame, _FORMULA, "'{}".format)
    protected.to_csv(text, header=header, index=False, lineterminator="\r\n")
    return text.getvalue()


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


def _change_texts(
    table: str, frame: pd.DataFrame, begins: re.Pattern[str], change: Callable[[str], str]
) -> pd.DataFrame:
    """Return a frame in which every text that begins in some way is another."""
    changed = {}
    for name in frame.columns.intersection(texts_of(table)):
        texts = (cell for cell in frame[name].unique() if isinstance(cell, str))
        others = {text: change(text) for text in texts if begins.match(text)}
        changed[name] = frame[name].replace(others)
    return frame.assign(**changed)


SUMS = "sha256sums.txt"  # the file of the checksums, as `sha256sum --check` reads it
_AGAIN = "delete the tables and run snakemake, which makes them again"

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of files in a folder."""
    lines = [f"{_digest(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / SUMS, "".join(lines))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_PART = 100_000  # rows of a large table that are read together


def make_frame(table: str, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table's rows as a frame, which has all columns even without rows.

    Values that a row lacks are unknown.

    Raises:
        ValueError: A row has a column that the table does not declare.
    """
    columns, listed = list(TABLES[table].columns), list(rows)
    if unknown := {name for row in listed for name in row}.difference(columns):
        raise ValueError(f"the table {table} declares no column {', '.join(sorted(unknown))}")
    return pd.DataFrame(listed, columns=pd.Index(columns))


def pick(table: str, *parts: BaseModel | None) -> dict[str, Any]:
    """Return the fields of parts of a result that a table has as columns."""
    names = set(TABLES[table].columns)
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= {} if part is None else part.model_dump(include=names)
    return fields


def read_table(path: Path) -> pd.DataFrame:
    """Read a table from a CSV file; a text such as ``null`` or ``12`` stays a text.

    Raises:
        InputError: The file is not a table; the message names it.
        OSError: It cannot be read.
    """
    return next(_read_parts(path, None))


def _read_parts(path: Path, rows: int | None) -> Iterator[pd.DataFrame]:
    texts = dict.fromkeys(texts_of(path.stem), str)
    try:
        frame = pd.read_csv(
            path, dtype=texts, keep_default_na=False, na_values=[""], chunksize=rows
        )
        for part in [frame] if isinstance(frame, pd.DataFrame) else frame:
            yield _change_texts(path.stem, part, _PROTECTED, lambda text: text[1:])
    except ValueError as error:
        raise InputError(f"{path}: is not a table ({error})") from None


class TableFolder(dict[str, pd.DataFrame]):
    """The tables of a folder of CSV files, by stem; each is checked and read on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> pd.DataFrame:
        return self.setdefault(name, read_table(self.check(name)))

    def check(self, name: str) -> Path:
        """Return the path of a table that is as ``write_sums`` found it.

        Raises:
            InputError: It is not, or the folder has no checksum of it; the message names the file.
            OSError: A file cannot be read.
        """
        path, sums = self._folder / f"{name}.csv", self._folder / SUMS
        digest = _digest(path)
        if not sums.is_file():
            why = f"is missing, so it is unknown whether {path} is whole"
            raise InputError(f"{sums}: {why}; {_AGAIN}")
        text = sums.read_text(encoding="utf-8", errors="replace")
        digests = {line["name"]: line["digest"] for line in _LINE.finditer(text)}
        if digests.get(path.name) != digest:
            raise InputError(f"{path}: was cut or edited after it was written; {_AGAIN}")
        return path


def rows_of(
    tables: Mapping[str, pd.DataFrame], name: str, runs: Iterable[tuple[str, str, int]]
) -> pd.DataFrame:
    """Return the rows of some runs, without holding a table that may be large.

    Runs are triples of experiment id, instrument and replicate.

    Raises:
        InputError: The file is not a table; the message names it.
    """
    index = pd.MultiIndex.from_tuples(list(runs), names=RUN_KEY)
    if isinstance(tables, TableFolder):
        parts = _read_parts(tables.check(name), _PART)
    else:
        parts = iter([tables[name]])
    chosen = (part[pd.MultiIndex.from_frame(part[RUN_KEY]).isin(index)] for part in parts)
    return pd.concat(chosen, ignore_index=True)


def naming_axes(experiments: pd.DataFrame, but: Iterable[str]) -> list[str]:
    """Return the axes, except those in ``but``, that distinguish the experiments of a table.

    Models that are trained in different ways differ in many axes that say nothing new. So, beside
    dtype and target, only those count in which the experiments of one model differ.
    """
    models = experiments.assign(model=[name_model(row) for _, row in experiments.iterrows()])
    groups = [group for _, group in models.groupby("model")]
    within = {name for group in groups for name in varying_axes(group, but)}
    return [name for name in varying_axes(experiments, but) if name in {"dtype", "target", *within}]


def varying_axes(experiments: pd.DataFrame, but: Iterable[str]) -> list[str]:
    """Return the axes, except those in ``but``, in which the experiments of a table differ."""
    there = [name for name in AXES if name in experiments and name not in set(but)]
    return [name for name in there if len(set(experiments[name].map(str))) > 1]


def least_of(rows: pd.DataFrame, column: str, sign: int = 1) -> Any:
    """Return the first row with the smallest known value of a column; the largest for a sign of -1.

    Raises:
        ValueError: No row has a known value.
    """
    return rows.iloc[int(np.nanargmin(sign * rows[column].astype(float).to_numpy()))]
