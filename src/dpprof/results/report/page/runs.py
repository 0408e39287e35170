"""What the HTML report shows of single runs: memory over a step, holdings, ends of logs."""

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import read_run
from dpprof.experiments.records.terms import COMPONENTS
from dpprof.results.analysis.difference.waterfall import Holding, list_holdings
from dpprof.results.analysis.tables.axes import RUN_KEY
from dpprof.results.report.page.data import plain

Runs = list[tuple[str, str, int]]
"""Runs, as (experiment id, instrument, replicate)."""

Rows = list[dict[str, Any]]
"""Rows with the columns of ``Holding``."""

JOINED = "smaller holdings"
"""The layer and operator of holdings that a thinned page joins."""

LINES = 20
"""How many lines of a log are quoted."""

_LOG_BYTES = 4096


def pack_timelines(timeline: pd.DataFrame, runs: Runs, parts: int | None) -> list[Any]:
    """Return the timelines of runs, in their order; None for a run without one."""
    steps = dict(iter(timeline.groupby(RUN_KEY, sort=False)))
    return [_pack_step(steps[run], parts) if run in steps else None for run in runs]


def _pack_step(step: pd.DataFrame, parts: int | None) -> dict[str, Any]:
    components = [name for name in COMPONENTS if step[name].any()]
    totals = step[components].to_numpy(np.int64).sum(axis=1)
    kept = step.iloc[thin(totals, step["phase"].tolist(), parts)]
    timed = not kept["elapsed_s"].isna().any()
    return {
        "ops": kept["ops"].tolist(),
        "elapsed_s": [plain(value) for value in kept["elapsed_s"]] if timed else None,
        "phase": kept["phase"].tolist(),
        "op": [plain(value) for value in kept["op"]],
        "components": {name: kept[name].tolist() for name in components},
    }


def thin(totals: npt.NDArray[np.int64], phases: list[str], parts: int | None) -> list[int]:
    """Return the instants of a timeline to keep: in each of equal parts the highest.

    The first and last of the step and of each phase stay too. The peak is always kept.
    """
    count = len(totals)
    if parts is None or count <= parts:
        return list(range(count))
    highest = (part[totals[part].argmax()] for part in np.array_split(np.arange(count), parts))
    kept = {int(row) for row in highest} | {0, count - 1}
    for row in range(1, count):
        if phases[row] != phases[row - 1]:
            kept |= {row - 1, row}
    return sorted(kept)


def read_holdings(root: Path, run: tuple[str, str, int]) -> Rows:
    """Return every byte of the peak of a run as rows, the largest first.

    A run whose result does not tell, or cannot be read, has no rows: the tables know its
    components. ``root`` is the folder that holds ``results``.
    """
    experiment_id, instrument, replicate = run
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
        "columns": {name: [row[name] for row in rows] for name in Holding.__annotations__},
    }


def read_end(log: Path, folder: Path) -> str | None:
    """Return the last lines of a log; None if it cannot be read.

    A log that lies outside of ``folder``, by links or by ``..``, is not read: its path comes from
    a result file.
    """
    try:
        if not log.resolve().is_relative_to(folder.resolve()) or not log.is_file():
            return None
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
    return "\n".join(text.splitlines()[-LINES:])
