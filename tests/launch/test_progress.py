from types import SimpleNamespace

import pytest
from factory import make_experiment, make_kernels, write_synthetic

from dpprof.experiments.launch.progress import Progress, format_duration, tell_result, tell_to_do


@pytest.fixture
def sweep(tmp_path, monkeypatch) -> Progress:
    monkeypatch.setenv("DPPROF_PROGRESS", "")  # so that what start() sets is undone
    fast, slow = make_experiment(), make_experiment(method="microbatch")
    Progress.start(
        tmp_path / "p.jsonl", [("a", fast), ("b", fast), ("c", slow), ("d", slow), ("e", slow)]
    )
    return tmp_path / "p.jsonl"


def conclude(name: str, wall_s: float) -> None:
    Progress.current().conclude(name, SimpleNamespace(wall_s=wall_s, outcome="ok"))


def test_before_the_first_run_ends_nothing_is_promised(sweep, capsys) -> None:
    Progress.current().announce("a")

    assert capsys.readouterr().err == "dpprof: [1/5] a\n"


def test_time_left_is_the_median_of_the_same_kind(sweep) -> None:
    conclude("a", 10.0)
    conclude("c", 100.0)
    conclude("d", 120.0)

    # b is as fast as a; e takes the median of 100 and 120.
    assert Progress.current().seconds_left() == 10.0 + 110.0


def test_an_unseen_kind_takes_the_median_of_all(sweep) -> None:
    conclude("a", 10.0)
    conclude("b", 20.0)

    assert Progress.current().seconds_left() == 3 * 15.0


def test_the_announcement_counts_what_has_ended(sweep, capsys) -> None:
    conclude("a", 30.0)
    Progress.current().announce("b")

    assert capsys.readouterr().err == "dpprof: [2/5] b, about 2 min 0 s left\n"


@pytest.mark.parametrize("text", ["", "[]", "[1]", "[" * 100_000, "[" + "1" * 10_000 + "]", "\0"])
def test_a_damaged_or_missing_file_costs_nothing(sweep, text) -> None:
    sweep.write_text(text)
    assert Progress.current() is None
    sweep.unlink()
    assert Progress.current() is None


@pytest.mark.parametrize(
    "line",
    ["[]", "[" * 100_000, '{"b": null}', '{"b": "x"}', '{"run": "b", "wa']
    + [f'{{"b": {number}}}' for number in ("NaN", "Infinity", "1e308", "-1")],
)
def test_a_line_that_nobody_wrote_is_passed_over(sweep, line) -> None:
    conclude("a", 10.0)
    with sweep.open("a") as file:
        file.write(line + "\n")

    progress = Progress.current()
    assert progress.seconds_left() == 4 * 10.0
    progress.announce("b")


def test_a_folder_in_its_place_costs_the_progress_and_not_the_sweep(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_PROGRESS", "of an earlier sweep")
    (tmp_path / "p.jsonl").mkdir()
    Progress.start(tmp_path / "p.jsonl", [("a", make_experiment())])

    assert Progress.current() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3600, "1 h 0 min"),
        (8000, "2 h 13 min"),
    ],
)
def test_durations_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_traced_run_tells_what_takes_most(tmp_path, capsys) -> None:
    traced = {("forward", "gemm"): 0.5, ("step", "optimizer"): 0.3, ("noise", "random"): 0.05}
    kernels = make_kernels(traced | {("forward", "copy"): 0.01}, idle_s=0.14)
    tell_result(write_synthetic(tmp_path, make_experiment(), instrument="kernels", kernels=kernels))

    told = capsys.readouterr().err
    assert "traced step 1000.0 ms, gemm 50%, optimizer 30%, random 5%, idle 14%" in told


def test_each_part_has_its_number_and_time_and_they_add_up() -> None:
    jobs = {"ceilings": 1, "measurement": 10, "verify": 5, "report": 1, "all": 1}

    assert list(tell_to_do(jobs, cores=2)) == [
        "to do, about 2 min 35 s with small models on a processor:",
        "  1 device's ceilings, about 45 s",
        "  10 measurements, about 1 min 20 s",
        "  5 verifications, about 18 s",
        "  1 report, about 12 s",
    ]


def test_only_what_may_run_beside_others_is_faster_on_more_cores() -> None:
    jobs = {"measurement": 4, "prediction": 8}
    [_, alone, beside] = tell_to_do(jobs, cores=8)

    assert alone == "  4 measurements, about 32 s"
    assert beside == "  8 predictions, about 8 s"


def test_with_nothing_to_do_nothing_is_said() -> None:
    assert list(tell_to_do({"all": 1}, cores=2)) == []
