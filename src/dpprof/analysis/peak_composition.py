"""Which run's memory stands for an experiment, and who owned what at its peak."""

from collections.abc import Mapping

import pandas as pd

from dpprof.analysis.frames import RUN_KEY
from dpprof.records.result import COMPONENTS

RECORDERS = ("memory", "estimate")
"""The instruments whose timeline is of the experiment itself, the one to prefer first."""


def choose(runs: pd.DataFrame) -> pd.DataFrame:
    """Keep one run for each experiment: its first recorded one, or else its first estimate.

    Args:
        runs: A table with a row for each run that recorded or estimated memory.
    """
    rank = runs["instrument"].map({name: rank for rank, name in enumerate(RECORDERS)}).dropna()
    return runs.loc[rank.sort_values(kind="stable").index].drop_duplicates("experiment_id")


def compose(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Join the peaks of the chosen runs with their owners: a column for each component, in bytes.

    Args:
        tables: Of these, ``peaks`` and ``owners``.
    """
    owners = tables["owners"].set_index([*RUN_KEY, "component"])["bytes"].unstack()  # noqa: PD010
    by_owner = owners.reindex(columns=pd.Index(COMPONENTS)).fillna(0)
    return choose(tables["peaks"]).merge(by_owner, left_on=RUN_KEY, right_index=True)


def needed_bytes(peaks: pd.DataFrame) -> "pd.Series[float]":
    """Say what must fit: the peak of the steady state, or of the first step where that is higher.

    Args:
        peaks: Rows of the table ``peaks``.
    """
    return peaks[["peak_bytes", "first_step_peak_bytes"]].astype(float).max(axis=1)
