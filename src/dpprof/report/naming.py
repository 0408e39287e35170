"""The columns of a table that name its experiments, and the order of its rows."""

from collections.abc import Mapping

import pandas as pd

from dpprof.analysis.frames import varying_axes
from dpprof.report.cells import Cell, column, text_of

ORDER = ["model", "seq_len", "batch_size"]


def name_experiments(rows: pd.DataFrame) -> dict[str, Cell]:
    """Return the columns that name an experiment: the axes that vary among the rows."""
    varying = varying_axes(rows, but=("model", "method", "batch_size", "seq_len"))
    return (
        {"model": column("model")}
        | {name: _axis(name) for name in varying}
        | {"T": column("seq_len"), "B": column("batch_size"), "method": column("method")}
    )


def _axis(name: str) -> Cell:
    return lambda row: text_of(row[name])


def texts(naming: Mapping[str, Cell]) -> tuple[str, ...]:
    """Return the naming columns that are not numbers."""
    return tuple(name for name in naming if name not in ("T", "B"))
