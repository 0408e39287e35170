"""Each of several GPUs takes one experiment at a time, and others are waited for."""

import datetime as dt
import itertools
import subprocess
from pathlib import Path

from children import wait_for
from fake_gpus import environment, profile_command

from dpprof.experiments.records.result import Result, read_result


def start(output: Path, variables: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = profile_command(output, "--device=cuda", *options)
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


def interval(result: Result) -> tuple[dt.datetime, dt.datetime]:
    begin = dt.datetime.fromisoformat(result.started_at)
    return begin, begin + dt.timedelta(seconds=result.wall_s)


def most_at_once(intervals: list[tuple[dt.datetime, dt.datetime]]) -> int:
    return max(sum(one[0] <= begin < one[1] for one in intervals) for begin, _ in intervals)


def test_two_gpus_run_two_of_four_at_once_and_a_killed_supervisor_frees_its_own(tmp_path) -> None:
    """Those who work go on only when two are at work, which takes the GPU of the killed one."""
    variables = environment(tmp_path, 2)
    (met := tmp_path / "met").mkdir()
    held = tmp_path / "held"
    waits = "--instrument=test-waits"
    victim = start(tmp_path / "victim.json", variables | {"DPPROF_TEST_MARKER": str(held)}, waits)
    wait_for(held.exists)
    variables |= {"DPPROF_TEST_MARKER": str(met), "DPPROF_TEST_TOGETHER": "2"}
    outputs = [tmp_path / f"{number}.json" for number in range(4)]
    meets = ("--instrument=test-meets", "--threads=1")
    running = [start(output, variables, *meets) for output in outputs]
    wait_for(lambda: len(list(met.iterdir())) == 1)
    victim.kill()
    victim.wait()
    said = [process.communicate(timeout=300)[1] for process in running]

    results = [read_result(output) for output in outputs]
    assert [result.outcome for result in results] == ["ok"] * 4, said
    threads = {result.provenance["settings"]["OMP_NUM_THREADS"] for result in results}
    assert threads == {"1"}
    assert most_at_once([interval(result) for result in results]) == 2
    by_uuid = {result.device["uuid"]: [] for result in results}
    for result in results:
        by_uuid[result.device["uuid"]].append(interval(result))
    assert sorted(by_uuid) == ["GPU-0", "GPU-1"]
    for intervals in by_uuid.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(intervals)):
            assert end <= begin
    assert not (tmp_path / "victim.json").exists()
