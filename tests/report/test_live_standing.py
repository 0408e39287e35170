"""How a sweep stands while it runs, from the files that a sweep leaves."""

import os
import subprocess
import sys

import pytest
from factory import make_experiment
from live_sweeps import NO_PROCESS, Sweep, plan_clean

from dpprof.report.live import standing
from dpprof.report.live.standing import Results, find_manifest
from dpprof.spec.validation import InputError

HOSTILE = "</script><b> {{7*7}} a\u202eb"


def look(sweep: Sweep) -> dict:
    return Results(sweep.root).look().told


def count(told: dict) -> tuple[int, int, int, int]:
    names = ("done", "failed", "running", "remaining")
    assert told["counts"]["planned"] == sum(told["counts"][name] for name in names)
    return tuple(told["counts"][name] for name in names)


def test_before_the_first_result_everything_remains_and_no_time_is_known(tmp_path) -> None:
    told = look(plan_clean(tmp_path, "standard", "flash-bk"))

    assert count(told) == (0, 0, 0, 2)
    assert (told["left_s"], told["left_unknown"]) == (None, 2)
    assert told["goes_on"] is True
    assert told["running"] == told["failed"] == []


def test_a_sweep_that_is_half_done_is_told_to_the_second(tmp_path) -> None:
    plain, private = make_experiment(), make_experiment(method="flash-bk")
    sweep = Sweep(
        tmp_path,
        *((plain, "clean", n) for n in range(3)),
        (private, "clean", 0),
        (private, "clean", 1),
        (make_experiment(method="microbatch"), "clean", 0),
        (plain, "memory", 0),
    )
    sweep.end(0, 10.0)
    sweep.end(1, 30.0)
    sweep.end(3, 100.0)
    sweep.end(5, 4.0, outcome="oom", message=HOSTILE)
    sweep.begin(2, ago_s=12.0)

    told = look(sweep)

    assert count(told) == (3, 1, 1, 2)
    (running,) = told["running"]
    assert running["run"] == sweep.name(2)
    assert running["elapsed_s"] == pytest.approx(12.0, abs=10.0)
    assert running["expected_s"] == 20.0
    assert running["expected_from"] == "median of 2 runs of this experiment under clean"
    assert told["failed"] == [
        {
            "run": sweep.name(5),
            "outcome": "oom",
            "reason": f"SyntheticError in backward: {HOSTILE}",
        }
    ]
    # 20 s less what has passed, 100 s as the other replicate took; memory has never ended.
    assert told["left_s"] == pytest.approx(max(0.0, 20.0 - running["elapsed_s"]) + 100.0)
    assert told["left_unknown"] == 1


def test_an_expected_time_rests_on_what_is_nearest(tmp_path) -> None:
    one, larger = make_experiment(), make_experiment(batch_size=4)
    other = make_experiment(method="flash-bk")
    sweep = Sweep(tmp_path, (one, "clean", 0), (larger, "clean", 0), (other, "clean", 0))
    sweep.end(0, 7.0)
    sweep.begin(1)
    sweep.begin(2)

    told = {one["run"]: (one["expected_s"], one["expected_from"]) for one in look(sweep)["running"]}

    assert told == {
        sweep.name(1): (7.0, "1 run of custom standard under clean"),
        sweep.name(2): (7.0, "1 run of any experiment under clean"),
    }


def test_without_an_ended_run_of_the_instrument_the_time_is_null_with_a_reason(tmp_path) -> None:
    one = make_experiment()
    sweep = Sweep(tmp_path, (one, "clean", 0), (one, "memory", 0))
    sweep.end(0, 7.0)
    sweep.begin(1)

    (running,) = look(sweep)["running"]

    assert running["expected_s"] is None
    assert running["expected_from"] == "no run under memory has ended"


def test_a_run_whose_process_was_killed_remains(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk", goes_on=False)
    sweep.end(0, 1.0)
    sweep.begin(1, pid=NO_PROCESS)

    told = look(sweep)

    assert count(told) == (1, 0, 0, 1)
    assert told["goes_on"] is False


def test_a_younger_process_with_a_dead_ones_number_is_not_the_run(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as young:
        sweep.begin(0, pid=young.pid, ago_s=3600.0)
        assert count(look(sweep)) == (0, 0, 0, 1)
        sweep.begin(0, pid=young.pid)
        assert count(look(sweep)) == (0, 0, 1, 0)


@pytest.mark.parametrize(("goes_on", "running"), [(True, 1), (False, 0)])
def test_another_machines_run_lives_as_long_as_the_sweep(tmp_path, goes_on, running) -> None:
    sweep = plan_clean(tmp_path, "standard", goes_on=goes_on)
    sweep.begin(0, pid=NO_PROCESS, host="a node of a cluster")

    assert count(look(sweep)) == (0, 0, running, 1 - running)


def test_what_is_measured_again_remains_until_then(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0, 1.0)
    progress = tmp_path / "results/plan/progress.jsonl"
    lines = progress.read_text().splitlines(keepends=True)
    progress.write_text("".join(lines[:2]))  # a new sweep, which has planned it again

    assert count(look(sweep)) == (0, 0, 0, 2)
    progress.write_text(lines[0] + lines[1].replace('"pid": 1,', f'"pid": {NO_PROCESS},'))
    assert count(look(sweep)) == (1, 0, 0, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000, '"\ud800"'])
def test_a_damaged_result_is_a_failure_with_its_reason_until_it_is_replaced(tmp_path, text) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0, 1.0)
    (file,) = tmp_path.glob("results/clean/*.json")
    results = Results(tmp_path)
    assert count(results.look().told) == (1, 0, 0, 1)

    file.write_bytes(text.encode(errors="surrogatepass"))
    told = results.look().told
    assert count(told) == (0, 1, 0, 1)
    assert told["failed"][0]["outcome"] == "damaged"
    assert told["failed"][0]["reason"]

    sweep.end(0, 1.0)
    assert count(results.look().told) == (1, 0, 0, 1)


def test_what_lies_in_the_place_of_a_result_does_not_stop_the_watch(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk", goes_on=False)
    for at, make in enumerate((os.mkfifo, os.mkdir)):
        one, instrument, number = sweep.runs[at]
        path = tmp_path / "results" / instrument / f"{one.id}.r{number}.json"
        path.parent.mkdir(exist_ok=True)
        make(path)

    assert count(look(sweep)) == (0, 2, 0, 0)


@pytest.mark.parametrize("text", ["", "[]", "\0", "{}\n[1]\n{}\n"])
def test_without_a_readable_progress_file_the_results_speak(tmp_path, text) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0, 1.0)
    (tmp_path / "results/plan/progress.jsonl").write_text(text)

    told = look(sweep)

    assert count(told) == (1, 0, 0, 1)
    assert told["goes_on"] is None


def test_a_result_is_read_once(tmp_path, monkeypatch) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0, 1.0)
    results, read = Results(tmp_path), []
    known = standing.read_run
    monkeypatch.setattr(standing, "read_run", lambda *run: read.append(run) or known(*run))

    for _ in range(3):
        results.look()
    assert len(read) == 1
    sweep.end(1, 1.0)
    results.look()
    assert len(read) == 2


def test_the_config_that_was_planned_last_is_watched(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard")
    first = find_manifest(tmp_path)
    other = first.with_name("manifest-other.json")
    other.write_text(first.read_text())
    due = first.with_name("due-other.txt")
    due.write_text("due\n")
    os.utime(due, (2e9, 2e9))
    assert find_manifest(tmp_path) == other
    os.utime(due, (1e9, 1e9))
    assert find_manifest(tmp_path) == first
    assert look(sweep)["counts"]["planned"] == 1


def test_a_folder_that_is_no_sweeps_is_refused_in_a_sentence(tmp_path) -> None:
    with pytest.raises(InputError, match="results: is not a folder; run snakemake"):
        find_manifest(tmp_path)
    (tmp_path / "results").mkdir()
    with pytest.raises(InputError, match=r"is no sweep's results.*no manifest-\*\.json"):
        find_manifest(tmp_path)
