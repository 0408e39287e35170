"""Tables as data frames: made from rows, and read from CSV files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpprof.analysis.axes import AXES, name_model
from dpprof.analysis.table_columns import TABLES
from dpprof.spec.validation import InputError


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


def read_table(path: Path) -> pd.DataFrame:
    """Read a table from a CSV file; a text such as ``null`` or ``12`` stays a text.

    Raises:
        InputError: The file is not a table; the message names it.
        OSError: It cannot be read.
    """
    declared = TABLES[path.stem].columns if path.stem in TABLES else {}
    texts = {name: str for name, column in declared.items() if column.kind == "text"}
    try:
        return pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=[""])
    except ValueError as error:
        raise InputError(f"{path}: is not a table ({error})") from None


class TableFolder(dict[str, pd.DataFrame]):
    """The tables of a folder of CSV files, by stem; each is read on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> pd.DataFrame:
        return self.setdefault(name, read_table(self._folder / f"{name}.csv"))


def naming_axes(experiments: pd.DataFrame, but: Iterable[str]) -> list[str]:
    """Return the axes, except those in ``but``, that tell the experiments of a table apart.

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
