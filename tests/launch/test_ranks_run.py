"""Several ranks are one experiment: one JSON, a part for each, and the rank that failed by name."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from documents import validate
from factory import make_experiment

from dpprof.experiments.launch import supervisor
from dpprof.experiments.launch.supervisor import supervise
from dpprof.experiments.records.result import read_result
from dpprof.system.hardware import available_cores

NAMES = "clean, phases, memory, estimate, capacity"
TWO = "kind=ddp,world_size=2"

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Where processes put temporary files; none may stay."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def supervised(tmp_path: Path, instrument: str, **fields):
    output = tmp_path / "result.json"
    others = set(psutil.Process().children(recursive=True))
    experiment = make_experiment(**({"parallel": TWO} | fields))
    result = supervise(experiment, instrument, 0, output, tmp_path / "run.log")
    assert read_result(output) == result
    assert set(psutil.Process().children(recursive=True)) <= others
    left = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor_")}  # torch's own
    return result


def test_every_rank_has_a_part(tmp_path) -> None:
    result = supervised(tmp_path, "clean", method="flash-bk", timed_steps=3)

    assert (result.outcome, result.error) == ("ok", None)
    assert [part.rank for part in result.ranks] == [0, 1]
    assert [len(part.time.step_s) for part in result.ranks] == [3, 3]
    assert result.time == result.ranks[0].time
    assert result.ranks[1].memory.peak_rss_bytes > 0
    step_s = result.time.median_s  # of 2 samples of 4 tokens on each of 2 ranks
    assert result.throughput.samples_per_s == pytest.approx(4 / step_s)
    assert result.throughput.tokens_per_s == pytest.approx(16 / step_s)
    assert result.reasons["energy"].startswith("each rank")
    assert result.reasons["communication"] == "the instruments memory and estimate count it"
    validate(json.loads((tmp_path / "result.json").read_text()), "result")


def test_a_killed_rank_ends_all_and_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_ATTEMPTS", 1)
    result = supervised(tmp_path, "test-rank-1-dies")

    assert [attempt.outcome for attempt in result.attempts] == ["killed"]
    assert (result.error.rank, result.error.signal, result.error.phase) == (1, "SIGKILL", "clip")
    assert result.error.message.startswith("rank 1: ended by SIGKILL from outside")
    assert result.ranks is None


@pytest.mark.slow
def test_a_rank_without_memory_ends_all_and_is_named(tmp_path) -> None:
    result = supervised(tmp_path, "test-rank-1-has-no-room")

    assert (result.outcome, len(result.attempts)) == ("oom", 1)
    assert (result.error.rank, result.error.phase) == (1, "clip")
    assert result.error.message == "rank 1: no room for a shard"


@pytest.mark.slow
def test_a_rank_that_is_killed_from_outside_is_named(tmp_path, monkeypatch) -> None:
    marker = tmp_path / "rank-1"
    monkeypatch.setenv("DPPROF_TEST_MARKER", str(marker))

    def kill_each() -> None:
        for _ in range(2):  # both attempts
            while not (marker.exists() and (pid := marker.read_text())):
                time.sleep(0.05)
            marker.unlink()
            os.kill(int(pid), signal.SIGKILL)

    killing = threading.Thread(target=kill_each, daemon=True)
    killing.start()
    result = supervised(tmp_path, "test-rank-1-waits")
    killing.join()

    assert [attempt.outcome for attempt in result.attempts] == ["killed", "killed"]
    assert (result.error.rank, result.error.signal) == (1, "SIGKILL")


@pytest.mark.slow
def test_ranks_that_hang_are_ended_in_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_TEST_MARKER", str(tmp_path / "rank-1"))
    result = supervised(tmp_path, "test-rank-1-waits", timeout_s=15)

    assert (result.outcome, result.error.phase) == ("timeout", "forward")  # rank 0's


@pytest.mark.parametrize(
    ("fields", "instrument", "message"),
    [
        (
            {},
            "kernels",
            f"the instrument kernels runs on one process; several ranks have {NAMES}",
        ),
        (
            {"parallel": "kind=ddp,world_size=60000"},
            "clean",
            f"60000 ranks are too many for this processor, which takes {8 * available_cores()}",
        ),
        (
            {"method": "microbatch"},
            "estimate",
            "microbatch does not train on several ranks with ddp",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused(tmp_path, fields, instrument, message) -> None:
    result = supervised(tmp_path, instrument, **fields)

    assert (result.outcome, result.error.message) == ("unsupported", message)
