"""The page of a sweep that was really run, in a browser, beside the sweep's JSON files.

``.ci/run`` runs the smoke sweep and says in DPPROF_SWEEP where its results are.
"""

import json
import os
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from browsing import Opened
from html_pages import read_content

RESULTS = Path(os.environ.get("DPPROF_SWEEP", "nowhere"))

pytestmark = pytest.mark.skipif(
    not (RESULTS / "report.html").is_file(), reason="DPPROF_SWEEP names no results with a page"
)

CHOOSE = """(pairs) => pairs.map((pair) => {
    for (const [side, number] of pair.entries()) {
        const select = document.querySelectorAll("#compare select")[side];
        select.value = String(number);
        select.dispatchEvent(new Event("change"));
    }
    return document.querySelector("#compare .sum").textContent;
})"""


@pytest.fixture(scope="module")
def opened(browser):
    one = Opened(browser, RESULTS / "report.html", accept_downloads=True)
    yield one
    one.context.close()


def read(instrument: str, name: str, replicate: int = 0) -> dict:
    return json.loads((RESULTS / instrument / f"{name}.r{replicate}.json").read_text())


@pytest.fixture(scope="module")
def medians() -> dict[str, float]:
    """The median step time of each experiment over its processes."""
    found = defaultdict(list)
    for path in (RESULTS / "clean").glob("*.json"):
        document = json.loads(path.read_text())
        if document["outcome"] == "ok":
            found[path.name.rpartition(".r")[0]].append(document["time"]["median_s"])
    return {name: statistics.median(some) for name, some in found.items()}


def test_it_opens_from_disk_without_a_network_or_an_error(opened) -> None:
    assert opened.told == []
    assert opened.asked == [(RESULTS / "report.html").as_uri()]


def test_its_step_times_are_those_of_the_files_and_sort(opened, medians) -> None:
    rows = opened.save("experiments")
    told = {
        row["experiment_id"]: float(row["median_step_s"]) for row in rows if row["median_step_s"]
    }
    assert told == pytest.approx(medians, rel=1e-8)

    table = opened.page.locator("#experiments .table").first
    head = table.locator("th", has_text="step (ms)")
    column = table.locator("thead th").all_inner_texts().index(head.inner_text())
    head.locator("button").click()
    cells = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    seconds = [float(row[column].replace(",", "")) for row in cells if row[column][:1].isdigit()]
    assert len(seconds) > 2
    assert seconds == sorted(seconds)


def test_a_filter_keeps_a_method(opened) -> None:
    table = opened.page.locator("#experiments .table").first
    table.get_by_label("Filter").fill("flash-bk")
    names = table.locator("tbody th").all_inner_texts()
    assert names
    assert set(names) == {"flash-bk"}
    table.get_by_label("Filter").fill("")


def test_pointing_at_a_point_tells_its_time(opened, medians) -> None:
    told = opened.hint_at(opened.page.locator("#tradeoff svg .mark-symbol.role-mark path").first)
    method, *lines = told.splitlines()
    [line] = [line for line in lines if " ms a step" in line]
    shown_ms = float(line.partition(" ")[0].replace(",", ""))  # three digits
    known = [1e3 * seconds for name, seconds in medians.items() if f"-{method}-b" in name]
    assert any(shown_ms == pytest.approx(one, rel=0.005) for one in known), told


def test_any_two_runs_differ_by_what_their_files_say(opened) -> None:
    columns = read_content(RESULTS / "report.html")["peaks"]["columns"]
    names = ("instrument", "experiment_id", "replicate")
    runs = [*zip(*(columns[name] for name in names), strict=True)][:12]
    peaks = [read(*run)["memory"]["peak_allocated_bytes"] for run in runs]
    pairs = [(a, b) for a in range(len(runs)) for b in range(len(runs)) if a != b]
    told = opened.page.evaluate(CHOOSE, pairs)

    assert len(pairs) > 20
    assert told == [
        f"The peaks differ by {peaks[a] - peaks[b]:,} bytes; the bars leave 0 bytes."
        for a, b in pairs
    ]
