"""Memory over single steps, for the HTML report: thinned where they must be, never rounded."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dpprof.analysis.axes import RUN_KEY
from dpprof.records.terms import COMPONENTS
from dpprof.report.page.columns import pack_changes, pack_column, plain
from dpprof.report.page.detail import Runs


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


def pack_timelines(timeline: pd.DataFrame, runs: Runs, parts: int | None) -> list[Any]:
    """Return the timelines of runs, in their order; None for a run without one."""
    steps = dict(iter(timeline.groupby(RUN_KEY, sort=False)))
    return [_pack_timeline(steps[run], parts) if run in steps else None for run in runs]


def _pack_timeline(step: pd.DataFrame, parts: int | None) -> dict[str, Any]:
    components = [name for name in COMPONENTS if step[name].any()]
    totals = step[components].to_numpy(np.int64).sum(axis=1)
    kept = step.iloc[thin(totals, step["phase"].tolist(), parts)]
    timed = not kept["elapsed_s"].isna().any()
    return {
        "ops": pack_changes(kept["ops"].tolist()),
        "elapsed_s": [plain(value) for value in kept["elapsed_s"]] if timed else None,
        "phase": pack_column(kept["phase"]),
        "op": pack_column(kept["op"]),
        "components": {name: pack_changes(kept[name].tolist()) for name in components},
    }
