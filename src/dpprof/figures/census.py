"""What the census of components says at the named snapshots, for figures."""

from collections.abc import Mapping

import pandas as pd

from dpprof.figures.style import NothingToDrawError

MISSING = "no run of the instrument phases took a census"


def by_snapshot(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Spread the census out: a row an experiment and snapshot in time order, a column a component.

    Replicates agree to the byte, or the findings say that they do not; the largest is taken.

    Args:
        tables: Of these, ``components``.

    Raises:
        NothingToDrawError: No census was taken.
    """
    components = tables["components"]
    if components.empty:
        raise NothingToDrawError(MISSING)
    keys = ["experiment_id", "snapshot", "component"]
    return components.groupby(keys, sort=False)["bytes"].max().unstack(sort=False)  # noqa: PD010
