"""``dpprof watch``: what its page says of a sweep, when it is written, and when it is final."""

import html
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from factory import make_experiment
from html_pages import read_content, record
from live_sweeps import NO_PROCESS, Sweep, plan_clean

from dpprof.ask.commands import watch
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.planner import read_manifest
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.report.page import live
from dpprof.results.report.page.live import (
    LIVE_PAGE,
    LivePage,
    describe_sweep,
    find_manifest,
    read_progress,
)

HOSTILE = "</script><script>pwned=1</script><img src=x onerror=pwned=1> {{7*7}} a\u202eb"
STATE = {
    True: "Nothing is measured now: Snakemake plans, measures ceilings, verifies methods, or "
    "writes the report.",
    False: "No sweep runs; snakemake continues it.",
    None: "Whether a sweep runs is unknown.",
}


def read_status(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    (strip,) = re.findall(r'<aside id="sweep".*?</aside>', text, re.DOTALL)
    return [html.unescape(line) for line in re.findall(r"<p>(.*?)</p>", strip)]


def look(sweep: Sweep) -> list[str]:
    """Return what the page would say of the sweep."""
    tables = build_tables(collect(read_manifest(sweep.manifest), sweep.root, partial=True))
    return [*describe_sweep(tables, read_progress(sweep.root), is_live=True).lines]


def count(status: list[str]) -> tuple[int, ...]:
    done, planned, failed, running, remaining = map(int, re.findall(r"\d+", status[0]))
    assert planned == done + failed + running + remaining
    return done, failed, running, remaining


def test_a_sweep_that_is_half_done_is_described(tmp_path) -> None:
    plain, private = make_experiment(), make_experiment(method="flash-bk")
    sweep = Sweep(
        tmp_path,
        *((plain, "clean", n) for n in range(3)),
        *((private, "clean", n) for n in range(2)),
    )
    status = look(sweep)
    assert count(status) == (0, 0, 0, 5)
    assert status[1:3] == [STATE[True], "An unknown time of measuring is left."]

    sweep.end(0, 10.0)
    sweep.end(3, 100.0, outcome="oom", message=HOSTILE)
    sweep.begin(2, ago_s=12.0)
    status = look(sweep)
    assert count(status) == (1, 1, 1, 2)
    assert re.fullmatch(re.escape(sweep.name(2)) + r" runs since \d\d:\d\d:\d\d\.", status[1])
    assert status[2] == "About 2 min 0 s of measuring is left."  # 10 s, 10 s and 100 s
    assert re.fullmatch(
        r"This page was written at \d\d:\d\d:\d\d; it is renewed while the sweep runs\.", status[3]
    )


@pytest.mark.parametrize("host", ["", "a node of a cluster"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_lives_as_long_as_its_process_or_elsewhere_its_sweep(tmp_path, host, goes_on) -> None:
    sweep = plan_clean(tmp_path, "standard", goes_on=goes_on)
    sweep.begin(0, pid=NO_PROCESS, host=host)

    runs = bool(host) and goes_on
    status = look(sweep)
    assert count(status) == (0, 0, int(runs), int(not runs))
    assert (status[1] == STATE[goes_on]) == (not runs)


def test_a_younger_process_with_a_dead_ones_number_is_not_the_run(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as young:
        sweep.begin(0, pid=young.pid, ago_s=3600.0)
        assert count(look(sweep)) == (0, 0, 0, 1)
        sweep.begin(0, pid=young.pid)
        assert count(look(sweep)) == (0, 0, 1, 0)


def test_what_is_measured_again_remains_until_then(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0)
    lines = sweep.progress.read_text().splitlines(keepends=True)
    sweep.progress.write_text("".join(lines[:2]))  # a new sweep, which has planned it again
    assert count(look(sweep)) == (0, 0, 0, 2)

    sweep.kill()
    assert count(look(sweep)) == (1, 0, 0, 1)


@pytest.mark.parametrize("text", ["[" * 10_000, '"\ud800"', None])
def test_a_damaged_result_is_a_failure_until_it_is_replaced(tmp_path, text) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0)
    (file,) = tmp_path.glob("results/clean/*.json")
    file.unlink()
    os.mkfifo(file) if text is None else file.write_bytes(text.encode(errors="surrogatepass"))
    assert count(look(sweep)) == (0, 1, 0, 1)

    file.unlink()
    sweep.end(0)
    assert count(look(sweep)) == (1, 0, 0, 1)


@pytest.mark.parametrize("text", ["", "\0", "{}\n[1]\n{}\n"])
def test_without_a_readable_progress_file_the_results_count(tmp_path, text) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0)
    sweep.progress.write_text(text)

    status = look(sweep)
    assert count(status) == (1, 0, 0, 1)
    assert status[1] == STATE[None]


def test_the_page_is_written_only_where_something_has_changed(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    page = LivePage(tmp_path)

    assert [page.renew(), page.renew()] == [True, False]
    sweep.end(0)
    assert [page.renew(), page.renew()] == [True, False]


def test_the_config_that_was_planned_last_is_watched(tmp_path) -> None:
    first = plan_clean(tmp_path, "standard").manifest
    other = first.with_name("manifest-other.json")
    other.write_text(first.read_text())
    due = first.with_name("due-other.txt")
    due.write_text("due\n")
    os.utime(due, (2e9, 2e9))
    assert find_manifest(tmp_path) == other
    os.utime(due, (1e9, 1e9))
    assert find_manifest(tmp_path) == first


def test_the_page_has_the_results_as_data_alone_and_allows_no_network(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk", "opacus-hooks")
    sweep.end(0)
    sweep.end(1, outcome="crashed", message=HOSTILE)
    LivePage(tmp_path).renew()
    page = (tmp_path / LIVE_PAGE).read_text(encoding="utf-8")
    content = read_content(tmp_path / LIVE_PAGE)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))

    assert content["experiments"]["columns"]["method"] == ["standard", "flash-bk"]
    assert content["failures"]["columns"]["error_message"] == [HOSTILE, "no result yet"]
    assert "pwned" not in page
    assert rules.pop("script-src").count("'sha256-") == page.count("<script>") == 3
    assert rules.pop("style-src").startswith("'sha256-")
    assert rules.pop("img-src") == "data:"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def test_it_ends_with_the_sweep_and_leaves_a_page_that_is_final(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard")
    page = LivePage(tmp_path)
    thread = threading.Thread(target=page.follow, args=(0.05,))
    thread.start()
    while not (tmp_path / LIVE_PAGE).exists():
        time.sleep(0.05)
    sweep.end(0)
    sweep.kill()
    thread.join(timeout=60)

    assert not thread.is_alive()
    status = read_status(tmp_path / LIVE_PAGE)
    assert count(status) == (1, 0, 0, 0)
    assert status[1] == "Every planned run has ended; the sweep's report is report.html."
    assert status[2].endswith("it is not renewed any more.")
    assert "location.reload" not in (tmp_path / LIVE_PAGE).read_text(encoding="utf-8")


def test_a_manifest_that_is_damaged_ends_it_with_a_final_page(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard")
    page = LivePage(tmp_path)
    page.renew()
    sweep.manifest.write_text("{")

    with pytest.raises(InputError, match="is not a manifest"):
        page.follow()
    assert "location.reload" not in (tmp_path / LIVE_PAGE).read_text(encoding="utf-8")


def test_a_page_that_cannot_be_made_is_tried_again(tmp_path, monkeypatch, capsys) -> None:
    sweep = plan_clean(tmp_path, "standard")
    tries = []

    def build(*arguments):
        tries.append(arguments)
        if len(tries) < 4:
            raise KeyError("a column")
        sweep.kill()
        return build_tables(*arguments)

    monkeypatch.setattr(live, "build_tables", build)
    LivePage(tmp_path).follow(0.01)

    said = "the page was not renewed, and is tried again: KeyError: 'a column'"
    assert capsys.readouterr().err.count(said) == 1
    assert count(read_status(tmp_path / LIVE_PAGE)) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (".", "results: is not a folder; run snakemake, which makes it"),
        ("results", "is no sweep's results, since plan/ in it has no manifest-*.json"),
        ("other", "--results: other is not allowed; it must be a folder named results"),
    ],
)
def test_a_folder_that_is_no_sweeps_is_refused(
    capsys, tmp_path, monkeypatch, made, sentence
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(made).mkdir(exist_ok=True)

    with pytest.raises(SystemExit):
        watch.main([f"--results={made if made == 'other' else 'results'}"])
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_an_interruption_ends_it_with_a_final_page_and_changes_nothing_else(
    tmp_path, number, status
) -> None:
    plan_clean(tmp_path, "standard").end(0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    # Beside other tests a nice process waits for minutes.
    program = "import os; os.nice = int; from dpprof.ask.commands.main import main; main(['watch'])"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said = process.stdout.readline()
        while not (tmp_path / LIVE_PAGE).exists():
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)

    assert said == "results/live.html shows the sweep; Ctrl-C ends it\n"
    assert process.returncode == status
    interrupted = "dpprof: interrupted; the page is not renewed any more; a sweep goes on\n"
    assert errors == (interrupted if number == signal.SIGINT else "")
    assert "location.reload" not in (tmp_path / LIVE_PAGE).read_text(encoding="utf-8")
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after.pop(tmp_path / LIVE_PAGE)
    assert after == before


def test_the_page_loads_itself_again_and_the_reader_keeps_the_place(open_page, tmp_path) -> None:
    methods = ("standard", "flash-bk", "opacus-hooks", "opacus-ghost")
    sweep = Sweep(tmp_path, *((make_experiment(method=m), "memory", 0) for m in methods))
    for at in range(3):
        sweep.end(at, recorded=record(at))
    watched = LivePage(tmp_path)
    watched.renew()
    opened = open_page(tmp_path / LIVE_PAGE, clock=True)
    page, status = opened.page, opened.page.locator("#sweep")

    names = page.get_by_label("A", exact=True).locator("option").all_inner_texts()
    page.get_by_label("A", exact=True).select_option(names[-1])
    page.locator("#compare").evaluate("(one) => window.scrollTo(0, one.offsetTop + 30)")
    top = page.locator("#compare").evaluate("(one) => one.getBoundingClientRect().top")
    sweep.end(3, outcome="crashed", message=HOSTILE)
    watched.renew()
    page.clock.fast_forward(10_000)
    page.keyboard.press("Shift")  # a reader who is busy is not disturbed
    page.clock.fast_forward(10_000)
    assert status.inner_text().startswith("3 of 4 runs done, 0 failed")
    page.clock.fast_forward(16_000)
    status.get_by_text("3 of 4 runs done, 1 failed, 0 running, 0 remaining").wait_for()
    page.wait_for_selector("html[data-ready=yes]")

    assert (
        page.get_by_label("A", exact=True).evaluate("(s) => s.selectedOptions[0].text")
        == (names[-1])
    )
    now = page.locator("#compare").evaluate("(one) => one.getBoundingClientRect().top")
    assert now == pytest.approx(top, abs=60.0)
    assert page.evaluate("typeof pwned") == "undefined"
    assert set(opened.asked) == {(tmp_path / LIVE_PAGE).as_uri()}
    assert opened.told == []
