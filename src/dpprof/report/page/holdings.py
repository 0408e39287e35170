"""What single runs hold at their peak, by component, layer and operator, for the HTML report."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dpprof.analysis.difference.waterfall import Holding, list_holdings
from dpprof.records.record import ResultError
from dpprof.records.result import read_run
from dpprof.report.page.columns import pack_column
from dpprof.report.page.detail import Runs
from dpprof.spec.validation import InputError

JOINED = "smaller holdings"
"""The layer and operator of holdings that a thinned page joins."""

Rows = list[dict[str, Any]]
"""Rows with the columns of ``Holding``."""


def read_holdings(root: Path, runs: Runs) -> list[Rows]:
    """Return every byte of the peaks of runs as rows, the largest first.

    A run whose result does not tell, or cannot be read, has no rows: the tables know its
    components.

    Args:
        root: The folder that holds ``results``.
        runs: The runs.
    """
    return [_read_holding(root, *run) for run in runs]


def _read_holding(root: Path, experiment_id: str, instrument: str, replicate: int) -> Rows:
    try:
        held = list_holdings(read_run(root, instrument, experiment_id, replicate))
    except (InputError, ResultError, OSError):
        return []
    return [{**row} for row in held]


def join_small(rows: Rows, most: int | None) -> Rows:
    """Return the largest rows, and of each component what the others sum to as one row.

    The bytes of each component stay the same.
    """
    if most is None or len(rows) <= most:
        return rows
    ordered = sorted(rows, key=lambda row: int(row["bytes"]), reverse=True)
    joined: dict[str, dict[str, Any]] = {}
    for row in ordered[most:]:
        empty = row | {"layer": JOINED, "op": JOINED, "phase": None, "bytes": 0, "storages": 0}
        into = joined.setdefault(row["component"], empty)
        into["bytes"] += row["bytes"]
        into["storages"] += row["storages"]
    return [*ordered[:most], *joined.values()]


def pack_holdings(holdings: Sequence[Rows], most: int | None) -> dict[str, Any]:
    """Return the holdings of runs as columns; ``starts`` says where the rows of each run begin."""
    shortened = [join_small(rows, most) for rows in holdings]
    rows = [row for of_run in shortened for row in of_run]
    return {
        "starts": [0, *accumulate(len(of_run) for of_run in shortened)],
        "columns": {
            name: pack_column(row[name] for row in rows) for name in Holding.__annotations__
        },
    }
