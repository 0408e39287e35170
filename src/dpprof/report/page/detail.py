"""How much of a result set the HTML report holds, so that it stays a small file."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pandas as pd

Runs = list[tuple[str, str, int]]
"""Runs, as (experiment id, instrument, replicate)."""


class Detail(NamedTuple):
    """How much of a result set a page holds; None is everything."""

    instants: int | None = None
    """Parts into which a step is divided; of each the highest instant is kept."""

    holdings: int | None = None
    """How many holdings of a peak are kept; the smaller ones of a component are joined."""

    runs: int = 2_000
    """How many runs keep their timeline and their holdings; the result files of these are read."""

    rows: int | None = None
    """How many rows a table keeps."""

    log_ends: int = 200
    """How many failures keep the end of their log."""

    def tell(
        self, frames: Mapping[str, pd.DataFrame], runs: Runs, quoted_logs: int
    ) -> Iterator[str]:
        """Say what the page leaves out, and where it is."""
        if self.instants is not None:
            yield (
                f"A timeline keeps the highest instant of each of {self.instants} parts of a step; "
                "results/tables/timeline.csv has all."
            )
        if self.holdings is not None:
            yield (
                f"Of what is held at a peak, the largest {self.holdings} parts are here one by "
                "one, and the smaller ones of a component as one sum; dpprof explain has all."
            )
        if len(runs) > self.runs:
            yield (
                f"Of {len(runs):,} recorded or predicted steps, {self.runs:,} of the largest "
                "settings have their timeline and holdings here; results/tables has all."
            )
        if quoted_logs > self.log_ends:
            yield (
                f"Of {quoted_logs:,} failures with a log the first {self.log_ends:,} have its end "
                "here; results/logs has all."
            )
        for name, frame in frames.items():
            if self.rows is not None and len(frame) > self.rows:
                yield (
                    f"Of {len(frame):,} {name} this page has the first {self.rows:,}; "
                    "results/tables has all."
                )


DETAILS = (
    Detail(),
    Detail(instants=150),
    Detail(instants=100, holdings=100),
    Detail(instants=60, holdings=40),
    Detail(instants=30, holdings=20),
    Detail(instants=30, holdings=20, runs=500),
    Detail(instants=30, holdings=20, runs=200, rows=10_000, log_ends=50),
    Detail(instants=30, holdings=20, runs=100, rows=3_000, log_ends=20),
    Detail(instants=30, holdings=20, runs=50, rows=1_000, log_ends=5),
)
"""From the finest on; a page takes the first that fits."""
