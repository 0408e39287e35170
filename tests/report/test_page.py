"""What the HTML report holds, how it is thinned, and what it never embeds."""

import re

import numpy as np
import pytest
from factory import make_experiment, tables_of_runs
from html_pages import METHODS, read_content, record, tables_of, write_html, write_results

from dpprof.results.report.content import build_document
from dpprof.results.report.page.data import JOINED, LINES, join_small, plain, read_end, thin
from dpprof.results.report.page.write import (
    DETAILS,
    LIMIT_BYTES,
    Detail,
    bundle_charts,
    embed,
    read_scripts,
    tell_contents,
)


def test_what_is_not_finite_is_refused_and_a_cell_becomes_unknown() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed(float("nan"))
    cells = [float("nan"), np.inf, None, 3.0, True, np.int64(2**60), 0.1234567891234]
    assert [plain(cell) for cell in cells] == [None, None, None, 3, True, 2**60, 0.123456789]


def test_a_thinned_timeline_keeps_peak_ends_and_every_phase() -> None:
    totals = np.array([1, 2, 3, 9, 3, 2, 1, 0, 5, 1])
    phases = ["forward"] * 4 + ["backward"] * 3 + ["step"] * 3
    kept = thin(totals, phases, 2)
    assert kept == [0, 3, 4, 6, 7, 8, 9]
    assert thin(totals, phases, None) == list(range(10))
    assert thin(totals, phases, 10) == list(range(10))


def test_joined_holdings_keep_the_bytes_of_every_component() -> None:
    def row(component, size):
        return {"component": component, "layer": "a", "op": "b", "phase": "step"} | {
            "bytes": size,
            "storages": 1,
        }

    rows = [row("noise", 7), row("inputs", 1), row("noise", 3), row("inputs", 2), row("noise", 9)]
    kept = join_small(rows, 2)
    assert [(one["component"], one["bytes"], one["storages"]) for one in kept] == [
        ("noise", 9, 1),
        ("noise", 7, 1),
        ("noise", 3, 1),
        ("inputs", 3, 2),
    ]
    assert [one["layer"] for one in kept] == ["a", "a", JOINED, JOINED]
    assert join_small(rows, None) == rows
    assert sum(one["bytes"] for one in rows) == 22  # the rows themselves are as they were


def test_details_get_coarser_and_each_says_what_is_left_out() -> None:
    counts = {"experiments": 20_000}
    assert list(DETAILS[0].tell(counts, 1_000, 200)) == []
    assert all(list(detail.tell(counts, 9_000, 0)) for detail in DETAILS[1:])
    for name in Detail._fields:
        limits = [getattr(detail, name) or np.inf for detail in DETAILS]
        assert limits == sorted(limits, reverse=True), name
    told = " ".join(DETAILS[-1].tell(counts, 9_000, 7))
    assert "Of 20,000 experiments this page has the first 1,000" in told
    assert "Of 9,000 recorded or predicted steps, 50" in told
    assert "Of 7 failures with a log the first 5 have its end here" in told


def test_coarser_pages_quote_fewer_logs(tmp_path) -> None:
    failed = {"outcome": "crashed"}
    runs = [(make_experiment(batch_size=1 + at), "clean", failed) for at in range(30)]
    tables = tables_of_runs(tmp_path, *runs)
    (tmp_path / "results" / "logs").mkdir()
    (tmp_path / "results" / "logs" / "x.log").write_text("<" * 4096, encoding="utf-8")
    tables["runs"]["error_log"] = "results/logs/x.log"
    contents = tell_contents(build_document(tables, []), tables, tmp_path / "results")

    for content, detail in zip(contents, DETAILS, strict=True):
        ends = content["failures"]["columns"]["log_end"]
        assert len(ends) - ends.count(None) == min(30, detail.log_ends)


def test_the_end_of_a_log_is_read_from_the_log_folder_alone(tmp_path) -> None:
    logs = tmp_path / "results" / "logs"
    logs.mkdir(parents=True)
    (logs / "x.log").write_text("\n".join(map(str, range(5_000))), encoding="utf-8")
    assert read_end(logs / "x.log", logs).split() == [str(4_999 - at) for at in range(LINES)][::-1]
    (logs / "bytes.log").write_bytes(b"\xff\xfe ok")
    assert read_end(logs / "bytes.log", logs).endswith("ok")
    secret = tmp_path / "secret"
    secret.write_text("secret", encoding="utf-8")
    (logs / "link.log").symlink_to(secret)
    for log in ("link.log", "../../secret", "absent.log", "", "a\0b"):
        assert read_end(logs / log, logs) is None, log


def test_a_page_names_no_address_but_that_of_the_charts_language() -> None:
    own = read_scripts()
    assert set(re.findall(r"https?://[^\s\"'`]+", own)) == {
        "https://vega.github.io/schema/vega-lite/v6.json"
    }
    assert "innerHTML" not in own
    assert "eval" not in own
    assert len(bundle_charts()) < LIMIT_BYTES / 4


def test_holdings_come_from_the_result_files_and_a_damaged_one_is_left_out(tmp_path) -> None:
    tables = tables_of(tmp_path, write_results(tmp_path))
    (damaged,) = tmp_path.glob("results/memory/*-flash-bk-*.json")
    damaged.write_text(damaged.read_text(encoding="utf-8").replace('"bytes"', '"byts"'))
    content = next(tell_contents(build_document(tables, []), tables, tmp_path / "results"))
    starts = content["holdings"]["starts"]
    columns = content["peaks"]["columns"]
    named = zip(columns["experiment_id"], columns["instrument"], strict=True)
    counts = dict(zip(named, np.diff(starts), strict=True))
    assert counts[damaged.name.removesuffix(".r0.json"), "memory"] == 0
    known = [count for run, count in counts.items() if run[1] == "estimate"]
    held = [record(rank, 512)["memory"]["at_peak"]["holdings"] for rank in range(len(METHODS))]
    assert sorted(known) == sorted(len(one["bytes"]) for one in held)


def test_the_page_has_what_report_json_has_first(tmp_path) -> None:
    tables = tables_of(tmp_path, write_results(tmp_path, outcome="oom", message="no room"))
    document = build_document(tables, [])
    content = read_content(write_html(tmp_path, tables))
    assert content["title"] == document.title
    assert content["headline"] == list(document.headline)
    assert [one["title"] for one in content["sections"]] == [one.title for one in document.sections]
    assert content["thinned"] == []
