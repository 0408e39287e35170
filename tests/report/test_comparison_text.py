"""The text and the Markdown of a comparison; names in it disturb neither."""

import pytest

from dpprof.ask.compare.show import render_markdown, render_text
from dpprof.experiments.records.comparison import ComparedFigure, FolderComparison, Run, Unlike
from dpprof.experiments.records.thresholds import Thresholds
from dpprof.results.report.comparison import summarise

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
    lines = render_text(make_comparison(worse, better, counts={"better": 1})).splitlines()

    assert lines == [
        "branch against main: 1 figure is worse, 1 is better.",
        "",
        "Worse",
        "  peak  e0  memory  1,024 bytes -> 2,048 bytes  +1.0 KiB (+100.00 %)",
        "",
        "Better",
        "  peak  e1  memory  1,024 bytes -> 512 bytes  -512 bytes (-50.00 %)",
        "",
        "1 experiment in common, in 2 runs. Figures judged: 3 of memory.",
    ]


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


def test_parts_are_named_in_words() -> None:
    figures = [
        make_figure(0, figure="component", part="per_sample_gradients"),
        make_figure(1, figure="bytes moved", part="gemm", phase="second_backward"),
        make_figure(2, figure="fits", unit=None, baseline=1, candidate=0, ratio=0.0),
        make_figure(
            3, metric="outcome", figure="outcome", unit=None, baseline="ok", candidate="oom"
        ),
        make_figure(
            4, figure="step time", unit="seconds", baseline=0.1, candidate=0.115, ratio=1.15
        ),
    ]
    lines = [" ".join(line.split()) for line in render_text(make_comparison(*figures)).splitlines()]

    assert lines[3].startswith("per-sample gradients at the peak e0 memory")
    assert lines[4].startswith("bytes moved by gemm in second backward e1 memory")
    assert lines[5] == "fits e2 memory yes -> no"
    assert lines[6] == "outcome e3 memory ok -> oom"
    assert lines[7] == "step time e4 memory 100 ms -> 115 ms +15.00 %"


def test_statistics_stand_below_a_time() -> None:
    statistics = {"baseline_processes": 10, "candidate_processes": 9, "noise_floor": 0.031}
    statistics |= {"ratio_low": 1.1, "ratio_high": 1.2, "p_value": 0.00018}
    figure = make_figure(
        figure="step time", unit="seconds", ratio=1.15, candidate=1.15, statistics=statistics
    )

    assert (
        "      ratio 1.150, 95 % interval 1.100 to 1.200, noise floor 3.1 %, p 0.00018, "
        "10 and 9 processes" in render_text(make_comparison(figure)).splitlines()
    )


def test_what_is_not_comparable_is_said_in_the_first_line() -> None:
    found = make_comparison(verdict="not comparable", exit_status=2, reason="torch 1 and 2")

    assert summarise(found) == "branch against main: not comparable: torch 1 and 2."
