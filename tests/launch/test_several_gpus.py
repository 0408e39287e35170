"""Each of several GPUs takes one experiment at a time, and others are waited for or refused."""

import datetime as dt
import itertools
import subprocess
from pathlib import Path

from children import wait_for
from fake_gpus import GIB, environment, occupy, profile_command

from dpprof.records.result import Result, read_result


def start(output: Path, variables: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = profile_command(output, *options)
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


def interval(result: Result) -> tuple[dt.datetime, dt.datetime]:
    begin = dt.datetime.fromisoformat(result.started_at)
    return begin, begin + dt.timedelta(seconds=result.wall_s)


def most_at_once(intervals: list[tuple[dt.datetime, dt.datetime]]) -> int:
    return max(sum(one[0] <= begin < one[1] for one in intervals) for begin, _ in intervals)


def test_four_gpus_run_four_of_twelve_at_once_and_a_killed_supervisor_frees_its_own(
    tmp_path,
) -> None:
    """Those who work go on only when four are at work, which takes the GPU of the killed one."""
    variables = environment(tmp_path, 4)
    (met := tmp_path / "met").mkdir()
    held = tmp_path / "held"
    waits = "--instrument=test-waits"
    victim = start(tmp_path / "victim.json", variables | {"DPPROF_TEST_MARKER": str(held)}, waits)
    wait_for(held.exists)
    variables |= {"DPPROF_TEST_MARKER": str(met), "DPPROF_TEST_TOGETHER": "4"}
    outputs = [tmp_path / f"{number}.json" for number in range(12)]
    meets = ("--instrument=test-meets", "--threads=1")
    running = [start(output, variables, *meets) for output in outputs]
    wait_for(lambda: len(list(met.iterdir())) == 3)
    victim.kill()
    victim.wait()
    said = [process.communicate(timeout=300)[1] for process in running]

    results = [read_result(output) for output in outputs]
    assert [result.outcome for result in results] == ["ok"] * 12, said
    threads = {result.provenance["settings"]["OMP_NUM_THREADS"] for result in results}
    assert threads == {"1"}
    assert most_at_once([interval(result) for result in results]) == 4
    by_uuid = {result.device["uuid"]: [] for result in results}
    for result in results:
        by_uuid[result.device["uuid"]].append(interval(result))
    assert sorted(by_uuid) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    for intervals in by_uuid.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(intervals)):
            assert end <= begin
    assert not (tmp_path / "victim.json").exists()


def test_a_run_is_refused_while_others_use_every_gpu_and_runs_once_one_is_free(tmp_path) -> None:
    variables = environment(tmp_path, 2)
    for uuid in ("GPU-0", "GPU-1"):
        occupy(tmp_path, uuid, used_bytes=9 * GIB)
    output = tmp_path / "results" / "test-measures" / "x.json"
    output.parent.mkdir(parents=True)

    def run(*options: str) -> Result:
        process = start(output, variables, "--instrument=test-measures", *options)
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said
        return read_result(output)

    refused = run("--busy-gpu=refuse")
    assert (refused.outcome, refused.error.kind) == ("unsupported", "BusyGpu")
    assert "others hold 9.0 GiB and 0% of the time of the GPU" in refused.error.message
    assert run("--busy-gpu=run").attempts[-1].others_before.memory_bytes == 9 * GIB

    occupy(tmp_path, "GPU-1", used_bytes=0)
    ran = run("--busy-gpu=refuse")
    assert (ran.outcome, ran.device["uuid"]) == ("ok", "GPU-1")


def test_others_who_leave_while_they_are_waited_for_are_not_beside_the_run(tmp_path) -> None:
    variables = environment(tmp_path, 1)
    occupy(tmp_path, "GPU-0", used_bytes=0, load=80)
    options = ("--instrument=test-measures", "--wait-for-idle-gpu-s=600")
    process = start(tmp_path / "x.json", variables, *options)
    said = next(line for line in process.stderr if "waiting" in line)
    occupy(tmp_path, "GPU-0", used_bytes=0)
    process.communicate(timeout=120)
    result = read_result(tmp_path / "x.json")

    assert "waiting for others, who hold 0.0 GiB and 80% of the time of GPU-0" in said
    assert (result.outcome, result.attempts[-1].others_before.load) == ("ok", 0.0)
