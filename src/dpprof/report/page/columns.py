"""Data frames as compact JSON: one list a column, and texts that repeat as numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

_DIGITS = 9
"""Significant digits of a number on the page; whole numbers are exact."""


def pack_frame(frame: pd.DataFrame) -> dict[str, Any]:
    """Return a frame as ``{"rows": count, "columns": {name: column}}``, which JSON can hold.

    A column whose values repeat is ``{"values": distinct values, "codes": their numbers}``; any
    other is a list. Unknown values are None.
    """
    columns = {str(name): pack_column(frame[name].tolist()) for name in frame.columns}
    return {"rows": len(frame), "columns": columns}


def pack_column(values: Iterable[Any]) -> Any:
    """Return a column as a list, or with each distinct text once where texts repeat."""
    told = [plain(value) for value in values]
    distinct = list(dict.fromkeys(told))
    if any(isinstance(value, str) for value in distinct) and 2 * len(distinct) <= len(told):
        codes = {value: code for code, value in enumerate(distinct)}
        return {"values": distinct, "codes": [codes[value] for value in told]}
    return told


def pack_changes(values: Sequence[int]) -> list[int]:
    """Return a series of whole numbers as its first value and the changes from each to the next."""
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def plain(value: Any) -> Any:
    """Return a table's cell as JSON has it: unknown and infinite as None, 3.0 as 3."""
    if value is None or isinstance(value, str | bool):
        return value
    if pd.isna(value) or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.{_DIGITS}g}")
