"""The table ``instrument_overhead``: the time and memory that each instrument adds to clean."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpprof.analysis.axes import axes_of
from dpprof.analysis.frames import make_frame
from dpprof.analysis.groups import Group
from dpprof.records.result import Observed

CLEAN = "clean"
_FIGURES = ("step_s", "peak_rss_bytes", "peak_allocated_bytes")


def tabulate_instrument_overhead(groups: Sequence[Group]) -> pd.DataFrame:
    """Return one row per experiment and instrument: medians over processes, and ratios to clean.

    Experiments without a clean run, and instruments that run nothing, have no row.
    """
    return make_frame("instrument_overhead", (row for group in groups for row in _describe(group)))


def _describe(group: Group) -> list[dict[str, Any]]:
    observed: dict[str, list[Observed]] = defaultdict(list)
    for result in group.results:
        if result.observed is not None:
            observed[result.instrument].append(result.observed)
    clean = observed.pop(CLEAN, [])
    if not clean:
        return []
    base = {f"clean_{figure}": _median(clean, figure) for figure in _FIGURES}
    rows = []
    for instrument, watched in observed.items():
        told = {figure: _median(watched, figure) for figure in _FIGURES}
        ratios = [_over(told[figure], base[f"clean_{figure}"]) for figure in _FIGURES]
        rows.append(
            {"experiment_id": group.experiment.id, "instrument": instrument}
            | axes_of(group.experiment)
            | {"processes": len(watched), "clean_processes": len(clean)}
            | told
            | base
            | dict(zip(("step_ratio", "rss_ratio", "allocated_ratio"), ratios, strict=True))
        )
    return rows


def _median(observed: Sequence[Observed], figure: str) -> float | None:
    known = [getattr(one, figure) for one in observed]
    return None if None in known else median(known)


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
