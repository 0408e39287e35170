"""Which run represents an experiment's memory, and which owners held memory at its peak."""

from collections.abc import Mapping

import pandas as pd

from dpprof.analysis.axes import RUN_KEY
from dpprof.records.terms import COMPONENTS

RECORDERS = ("memory", "estimate")
"""The instruments that record the experiment's own memory timeline, the preferred one first."""


def choose(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one run per experiment: its first recorded one, or else its first estimate."""
    rank = runs["instrument"].map({name: rank for rank, name in enumerate(RECORDERS)}).dropna()
    return runs.loc[rank.sort_values(kind="stable").index].drop_duplicates("experiment_id")


def compose(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the peaks of the chosen runs, with the bytes of each component as a column."""
    owners = tables["owners"].set_index([*RUN_KEY, "component"])["bytes"].unstack()  # noqa: PD010
    by_owner = owners.reindex(columns=pd.Index(COMPONENTS)).fillna(0)
    return choose(tables["peaks"]).merge(by_owner, left_on=RUN_KEY, right_index=True)


def needed_bytes(peaks: pd.DataFrame) -> "pd.Series[float]":
    """Return the bytes that must fit: what the allocator would reserve, where that is known.

    Elsewhere it is the higher of the steady-state and the first step's peak.
    """
    tensors = peaks[["peak_bytes", "first_step_peak_bytes"]].astype(float).max(axis=1)
    return peaks["reserved_bytes"].astype(float).fillna(tensors)


def find_fitting(peaks: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each run fits: by the simulated allocator, or else by its peak.

    A run that would reserve more than the memory fits if releasing the cache makes room.
    """
    within = needed_bytes(peaks) <= peaks["target_memory_bytes"].astype(float)
    return peaks["fits"].where(peaks["fits"].notna(), within).astype(bool)
