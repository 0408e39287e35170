"""A comparison as text, as Markdown, and as a report; names in it disturb neither."""

import json

import pytest
from factory import make_experiment, make_memory, tables_of_runs
from scripts import call
from snapshots import assert_reviewed

from dpprof.ask.compare import render_markdown, render_text
from dpprof.experiments.records.comparison import (
    ComparedFigure,
    FolderComparison,
    Run,
    Thresholds,
    Unlike,
)
from dpprof.results.report.comparison import summarise
from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.write import write_report

MIB = 2**20
HOSTILE = "x|y<b>`\x1b[31m\n# title \u202e$(rm -rf ~)"


def make_figure(number: int = 0, **fields) -> ComparedFigure:
    usual = {"experiment_id": f"e{number}", "instrument": "memory", "metric": "memory"}
    usual |= {"figure": "peak", "unit": "bytes", "baseline": 1024, "candidate": 2048}
    return ComparedFigure(**(usual | {"ratio": 2.0, "judgement": "worse"} | fields))


def make_comparison(*figures: ComparedFigure, **fields) -> FolderComparison:
    usual = {"verdict": "regression", "exit_status": 1, "reason": None, "metrics": ["memory"]}
    usual |= {"baseline": "main", "candidate": "branch", "across": [], "thresholds": Thresholds()}
    usual |= {"experiments": 1, "runs": 2, "counts": {}, "judged": {"memory": 3}}
    usual |= {"not_comparable": [], "only_in_baseline": [], "only_in_candidate": []}
    return FolderComparison(**(usual | {"figures": figures, "explanations": []} | fields))


def test_the_worst_comes_first_and_counts_last() -> None:
    worse, better = make_figure(), make_figure(1, judgement="better", candidate=512, ratio=0.5)
    comparison = make_comparison(worse, better, counts={"better": 1})

    assert_reviewed("report/comparison", render_text(comparison) + "\n")


@pytest.mark.parametrize("render", [render_text, render_markdown])
def test_long_tables_are_cut_and_say_so(render) -> None:
    said = render(make_comparison(*map(make_figure, range(23))))

    assert "e19" in said
    assert "e20" not in said
    assert "and 3 more; --format json lists all" in said
    assert "23 figures are worse" in said


@pytest.mark.parametrize("render", [render_text, render_markdown])
def test_hostile_names_stay_text(render) -> None:
    figure = make_figure(experiment_id=HOSTILE, instrument=HOSTILE, reason=HOSTILE, part=HOSTILE)
    run = Run(experiment_id=HOSTILE, instrument=HOSTILE)
    unlike = Unlike(
        kind="device", name=HOSTILE, baseline=HOSTILE, candidate="x", experiment_ids=[HOSTILE]
    )
    plain = {"baseline": "m", "candidate": "b"}
    hostile = {"baseline": HOSTILE, "candidate": HOSTILE}
    usual = make_comparison(make_figure(part="noise", reason="r"), **plain)
    found = make_comparison(
        figure,
        **hostile,
        only_in_baseline=[run],
        not_comparable=[unlike],
        reason=HOSTILE,
        explanations=[],
    )
    said = render(found)

    assert "\x1b" not in said
    assert "\u202e" not in said
    assert not any(line.startswith("# title") for line in said.splitlines())
    if render is render_markdown:
        assert "<b>" not in said
        [row] = [line for line in said.splitlines() if line.startswith("| peak")]
        [plain_row] = [line for line in render(usual).splitlines() if line.startswith("| peak")]
        assert row.replace("\\|", "").count("|") == plain_row.count("|")


def test_a_hostile_command_does_not_leave_its_block() -> None:
    told = {"experiment_id": "e0", "instrument": "memory", "command": "dpprof explain '\n```\n# x'"}
    lines = render_markdown(make_comparison(make_figure(), explanations=[told])).splitlines()
    block = lines[lines.index("```sh") + 1 :]

    assert block[:2] == ["dpprof explain '\\n```\\n# x'", "```"]


def test_parts_are_named_in_words_and_statistics_stand_below_a_time() -> None:
    statistics = {"baseline_processes": 10, "candidate_processes": 9, "noise_floor": 0.031}
    statistics |= {"ratio_low": 1.1, "ratio_high": 1.2, "p_value": 0.00018}
    outcome = {"metric": "outcome", "figure": "outcome", "baseline": "ok", "candidate": "oom"}
    time = {"figure": "step time", "unit": "seconds", "baseline": 0.1, "candidate": 0.115}
    figures = [
        make_figure(0, figure="component", part="per_sample_gradients"),
        make_figure(1, figure="bytes moved", part="gemm", phase="second_backward"),
        make_figure(2, figure="fits", unit=None, baseline=1, candidate=0, ratio=0.0),
        make_figure(3, unit=None, **outcome),
        make_figure(4, ratio=1.15, statistics=statistics, **time),
    ]

    assert_reviewed("report/compared parts", render_text(make_comparison(*figures)) + "\n")


def test_what_is_not_comparable_is_said_in_the_first_line() -> None:
    found = make_comparison(verdict="not comparable", exit_status=2, reason="torch 1 and 2")

    assert summarise(found) == "branch against main: not comparable: torch 1 and 2."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folders of results, of which the second needs 1 MiB more; the first has a report."""
    root = tmp_path_factory.mktemp("sides")
    for side, more in (("a", 0), ("b", MIB)):
        runs = [
            (
                make_experiment(method=method),
                "estimate",
                {"recorded": make_memory({"parameters": 8 * MIB, "noise": 2 * MIB + more})},
            )
            for method in ("standard", "flash-bk")
        ]
        tables = tables_of_runs(root / side, *runs)
        if side == "a":
            write_report(build_document(tables, []), root / side / "results")
    return root


def test_both_answers_and_what_changed_are_told(folder) -> None:
    done = call("report", "a/results", "b/results", "--output-dir=both", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "both" / "report.json").read_text())
    titles = [section["title"] for section in told["sections"]]

    assert titles == ["The answer of a/results", "Worse", "What was compared"]
    assert told["headline"][0].startswith("b/results against a/results: ")
    assert "figures are worse" in told["headline"][0]
    [table] = told["sections"][1]["blocks"]
    rows = [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]
    noise = next(row for row in rows if row["figure"] == "noise at the peak")
    assert (noise["baseline"], noise["candidate"]) == ("2,097,152 bytes", "3,145,728 bytes")
    assert (folder / "both" / "report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    "options", [["a/results"], [], ["a/results", "b/results", "--tables=a/results/tables"]]
)
def test_anything_but_tables_or_two_folders_is_refused(folder, options) -> None:
    done = call("report", *options, "--output-dir=no", cwd=folder)

    assert done.returncode != 0
    assert "give either --tables, or two folders of results to compare" in done.stderr
    assert not (folder / "no").exists()
