"""Everything that the HTML report holds, at each of several details."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.results.analysis.selection import Tables
from dpprof.results.analysis.tables.axes import RUN_KEY, name_speed
from dpprof.results.analysis.tables.frames import rows_of
from dpprof.results.report.page.data import (
    list_axes,
    list_experiments,
    list_failures,
    list_kernels,
    list_peaks,
    list_trainings,
    pack_frame,
    tell_style,
)
from dpprof.results.report.page.runs import (
    Runs,
    pack_holdings,
    pack_timelines,
    read_end,
    read_holdings,
)
from dpprof.results.report.rendering.document import Document, Picture


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

    def tell(self, counts: Mapping[str, int], runs: int, logs: int) -> Iterator[str]:
        """Say what the page leaves out, and where it is.

        Args:
            counts: The rows of each table.
            runs: The recorded or predicted steps.
            logs: The failures with a log.
        """
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
        if runs > self.runs:
            yield (
                f"Of {runs:,} recorded or predicted steps, {self.runs:,} of the largest "
                "settings have their timeline and holdings here; results/tables has all."
            )
        if logs > self.log_ends:
            yield (
                f"Of {logs:,} failures with a log the first {self.log_ends:,} have its end "
                "here; results/logs has all."
            )
        for name, rows in counts.items():
            if self.rows is not None and rows > self.rows:
                yield (
                    f"Of {rows:,} {name} this page has the first {self.rows:,}; "
                    "results/tables has all."
                )


DETAILS = (
    Detail(),
    Detail(instants=150, holdings=150),
    Detail(instants=60, holdings=40),
    Detail(instants=30, holdings=20, runs=500, rows=10_000, log_ends=50),
    Detail(instants=30, holdings=20, runs=50, rows=1_000, log_ends=5),
)
"""Details, the finest first; a page takes the first that fits."""


def embed_figures(document: Document, folder: Path) -> dict[str, str]:
    """Return the pictures of the report by name, as text; those that have no file are left out."""
    blocks = [block for section in document.sections for block in section.blocks]
    names = [block.name for block in blocks if isinstance(block, Picture)]
    return {
        name: base64.b64encode(file.read_bytes()).decode()
        for name in names
        if (file := folder / f"{name}.png").is_file()
    }


def tell_contents(document: Document, tables: Tables, results: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of the page, each with less detail than the one before.

    Args:
        document: The report, of which the page shows all but the appendix.
        tables: The tables of the analysis.
        results: The folder ``results``, whose logs and result files are read.
    """
    root = results.absolute().parent
    experiments = list_experiments(tables)
    peaks, failures = list_peaks(tables, experiments), list_failures(tables)
    kernels, traces = list_kernels(tables)
    logs = failures["error_log"].dropna()
    quoted = logs[: DETAILS[0].log_ends].map(lambda log: read_end(root / log, results / "logs"))
    runs: Runs = [tuple(key) for key in peaks[RUN_KEY].itertuples(index=False)]
    first = runs[: DETAILS[0].runs]
    holdings = [read_holdings(root, run) for run in first]
    timeline = rows_of(tables, "timeline", first)
    frames = {
        "experiments": experiments,
        "peaks": peaks,
        "kernels": kernels,
        "traces": traces,
        "failures": failures,
    }
    counts = {name: len(frame) for name, frame in frames.items()}
    figures = embed_figures(document, results / "figures")
    for detail in DETAILS:
        frames["failures"] = failures.assign(log_end=quoted[: detail.log_ends])
        yield {
            "title": document.title,
            "question": document.question,
            "headline": list(document.headline),
            "sections": [section.model_dump(mode="json") for section in document.sections],
            "figures": figures,
            "axes": list_axes(experiments),
            "trainings": pack_frame(list_trainings(tables)),
            "speed": name_speed(row for _, row in tables["advice"].iterrows()),
            "noise": pack_frame(tables["noise"].loc[lambda rows: rows["chosen"].astype(bool)]),
            "style": tell_style(tables),
            "outcomes": pack_frame(tables["outcomes"]),
            **{name: pack_frame(frame[: detail.rows]) for name, frame in frames.items()},
            "timelines": pack_timelines(timeline, first[: detail.runs], detail.instants),
            "holdings": pack_holdings(holdings[: detail.runs], detail.holdings),
            "thinned": list(detail.tell(counts, len(runs), len(logs))),
        }
