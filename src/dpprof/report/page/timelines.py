"""Memory over single steps, for the HTML report: thinned where they must be, never rounded."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dpprof.analysis.tables.axes import RUN_KEY
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


class Timelines:
    """The table ``timeline`` by run, to be packed in more than one detail."""

    def __init__(self, timeline: pd.DataFrame) -> None:
        self._steps = dict(iter(timeline.groupby(RUN_KEY, sort=False)))
        self._components = {
            run: [name for name in COMPONENTS if step[name].any()]
            for run, step in self._steps.items()
        }

    def count(self, runs: Runs, parts: int | None) -> int:
        """Return how many numbers the timelines of runs have at least, thinned to so many parts."""
        told = [(len(self._steps[run]), len(self._components[run])) for run in self._known(runs)]
        return sum((1 + held) * min(rows, parts or rows) for rows, held in told)

    def pack(self, runs: Runs, parts: int | None) -> list[Any]:
        """Return the timelines of runs, in their order; None for a run without one."""
        known = set(self._known(runs))
        return [self._pack(run, parts) if run in known else None for run in runs]

    def _known(self, runs: Runs) -> list[tuple[str, str, int]]:
        return [run for run in runs if run in self._steps]

    def _pack(self, run: tuple[str, str, int], parts: int | None) -> dict[str, Any]:
        step, components = self._steps[run], self._components[run]
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
