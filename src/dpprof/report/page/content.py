"""Everything that the HTML report holds, at the finest detail that fits into its size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from dpprof.analysis.tables.axes import RUN_KEY
from dpprof.analysis.tables.frames import rows_of
from dpprof.report.page.columns import pack_frame
from dpprof.report.page.data import (
    Tables,
    list_experiments,
    list_failures,
    list_kernels,
    list_peaks,
    tell_style,
)
from dpprof.report.page.detail import DETAILS, Runs
from dpprof.report.page.holdings import pack_holdings, read_holdings
from dpprof.report.page.logs import read_ends
from dpprof.report.page.timelines import Timelines
from dpprof.report.rendering.document import Document


def tell_contents(
    document: Document, tables: Tables, results: Path, limit_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the contents of the page, each with less detail than the one before.

    Args:
        document: The report, of which the page shows the first lines and the first two sections:
            the answer, and whether it can be believed.
        tables: The tables of the analysis.
        results: The folder ``results``, whose logs are read.
        limit_bytes: What is certain to be larger, as JSON, is not made; None: everything is.
    """
    experiments = list_experiments(tables)
    peaks, failures = list_peaks(tables, experiments), list_failures(tables)
    kernels, traces = list_kernels(tables)
    logs = failures["error_log"].dropna()
    told = logs[: DETAILS[0].log_ends]
    ends = read_ends(told, results.absolute().parent, results / "logs")
    runs: Runs = [tuple(key) for key in peaks[RUN_KEY].itertuples(index=False)]
    holdings = read_holdings(results.absolute().parent, runs[: DETAILS[0].runs])
    timelines = Timelines(rows_of(tables, "timeline", runs[: DETAILS[0].runs]))
    fixed = {
        "title": document.title,
        "question": document.question,
        "headline": list(document.headline),
        "answer": [section.model_dump(mode="json") for section in document.sections[:2]],
        "style": tell_style(tables),
        "outcomes": pack_frame(tables["outcomes"]),
    }
    for detail in DETAILS:
        # A number has a digit and a comma.
        least_bytes = 2 * timelines.count(runs[: detail.runs], detail.instants)
        if limit_bytes is not None and least_bytes > limit_bytes and detail is not DETAILS[-1]:
            continue
        quoted = dict(list(zip(told.index, ends, strict=True))[: detail.log_ends])
        of_rows = {
            "experiments": experiments,
            "peaks": peaks,
            "kernels": kernels,
            "traces": traces,
            "failures": failures.assign(log_end=pd.Series(quoted, dtype=object)),
        }
        yield (
            fixed
            | {name: pack_frame(frame[: detail.rows]) for name, frame in of_rows.items()}
            | {
                "timelines": timelines.pack(runs[: detail.runs], detail.instants),
                "holdings": pack_holdings(holdings[: detail.runs], detail.holdings),
                "thinned": list(detail.tell(of_rows, runs, len(logs))),
            }
        )
