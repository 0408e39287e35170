"""The page of a sweep that was really run, in a browser, beside the sweep's JSON files.

``.ci/run`` runs the default sweep and says in DPPROF_SWEEP where its results are.
"""

import itertools
import json
import os
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from browsing import Opened
from html_pages import list_steps

RESULTS = Path(os.environ.get("DPPROF_SWEEP", "nowhere"))

pytestmark = pytest.mark.skipif(
    not (RESULTS / "report.html").is_file(), reason="DPPROF_SWEEP names no results with a page"
)


@pytest.fixture(scope="module")
def opened(browser):
    one = Opened(browser, RESULTS / "report.html", accept_downloads=True)
    yield one
    one.context.close()


def test_its_step_times_are_those_of_the_files(opened) -> None:
    assert opened.told == []
    found = defaultdict(list)
    for path in (RESULTS / "clean").glob("*.json"):
        document = json.loads(path.read_text())
        if document["outcome"] == "ok":
            found[path.name.rpartition(".r")[0]].append(document["time"]["median_s"])
    medians = {name: statistics.median(some) for name, some in found.items()}
    rows = opened.save("experiments")
    timed = [row for row in rows if row["median_step_s"]]

    told = {row["experiment_id"]: float(row["median_step_s"]) for row in timed}
    assert told == pytest.approx(medians, rel=1e-8)


def test_any_two_runs_differ_by_what_their_files_say(opened) -> None:
    steps = list_steps(RESULTS / "report.html")[:12]
    files = [RESULTS / kind / f"{name}.r{number}.json" for name, kind, number in steps]
    peaks = [json.loads(path.read_text())["memory"]["peak_allocated_bytes"] for path in files]
    pairs = [*itertools.permutations(range(len(steps)), 2)]

    assert len(pairs) >= 12
    assert opened.subtract(pairs) == [
        f"The peaks differ by {peaks[a] - peaks[b]:,} bytes; the bars leave 0 bytes."
        for a, b in pairs
    ]
