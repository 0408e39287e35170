"""What a scheduler's SIGTERM leaves, and what the next job makes of it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from checkout import wait_for

from dpprof.launch.interrupted import drop_copies
from dpprof.launch.progress import Progress
from dpprof.launch.scheduler import scheduler_job
from dpprof.records.result import Result, interrupted_path, read_result

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "workflow" / "scripts" / "profile.py"


class Job:
    """A job whose run waits, and the file that it leaves when it has begun."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output, self.log = folder / "x.json", folder / "x.log"
        self.marker = folder / "reached"
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "plugin"))
        monkeypatch.setenv("DPPROF_TEST_MARKER", str(self.marker))
        monkeypatch.setenv("DPPROF_LOCK_DIR", str(folder))

    instrument = "test-waits"

    def start(self, number: str, batch_size: int = 1) -> subprocess.Popen[str]:
        self._monkeypatch.setenv("SLURM_JOB_ID", number)
        fields = ["--model=tiny", "--method=standard", f"--batch-size={batch_size}", "--seq-len=4"]
        options = [f"--output={self.output}", f"--log={self.log}", "--keep", *fields]
        command = [sys.executable, str(SCRIPT), f"--instrument={self.instrument}", *options]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def end(self, number: str, *, worker_first: bool = False) -> str:
        """Start a job, and have the scheduler end it in its work; returns what it said."""
        self.marker.unlink(missing_ok=True)
        process = self.start(number)
        wait_for(self.marker.exists)
        (worker,) = psutil.Process(process.pid).children()
        if worker_first:
            worker.terminate()
            wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert not worker.is_running()
        return said

    def finish(self, number: str, batch_size: int = 1) -> str:
        """Start a job and let it end well; returns what it said."""
        self.marker.unlink(missing_ok=True)
        process = self.start(number, batch_size)
        wait_for(lambda: self.marker.exists() or process.poll() is not None)
        self.marker.unlink(missing_ok=True)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said

    def messages(self) -> list[str | None]:
        return [attempt.error and attempt.error.message for attempt in self.result().attempts]

    def result(self) -> Result:
        return read_result(self.output)


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    return Job(tmp_path, monkeypatch)


def ended(number: str) -> str:
    how = "it was cancelled or preempted, or its time was over"
    return f"the scheduler ended Slurm job {number}: {how}"


@pytest.mark.parametrize("worker_first", [False, True])
def test_a_schedulers_sigterm_leaves_a_complete_killed_result(job, worker_first) -> None:
    said = job.end("17", worker_first=worker_first)

    result = job.result()
    assert (result.outcome, len(result.attempts)) == ("killed", 1)
    assert (result.error.kind, result.error.signal) == ("Scheduler", "SIGTERM")
    assert (result.error.message, result.error.phase) == (ended("17"), "setup")
    assert result.error.log == str(job.log)
    assert "attempt 1: killed" in job.log.read_text()
    assert "the scheduler has ended this job; the attempt is recorded" in said


def test_the_next_job_tries_again_and_carries_the_attempt_over(job) -> None:
    job.end("17")
    job.output.unlink()  # Snakemake deletes what a failed job leaves
    job.finish("18")

    result = job.result()
    assert [attempt.outcome for attempt in result.attempts] == ["killed", "ok"]
    assert (result.outcome, result.error) == ("ok", None)
    assert job.messages() == [ended("17"), None]
    assert not interrupted_path(job.output).exists()


def test_a_run_that_is_ended_twice_is_final(job) -> None:
    job.end("17")  # and its Snakemake is gone too: nobody deletes the result
    job.end("18")
    job.output.unlink()
    job.log.unlink()
    said = job.finish("19")

    result = job.result()
    assert (result.outcome, job.messages()) == ("killed", [ended("17"), ended("18")])
    assert "already measured this run; its result is kept" in said
    assert not job.marker.exists()
    assert ended("17") in job.log.read_text()
    assert ended("18") in job.log.read_text()
    assert not interrupted_path(job.output).exists()


def test_a_job_that_may_have_failed_for_its_memory_loses_no_result(job) -> None:
    job.instrument = "test-dies"
    job.finish("17")
    assert job.messages()[1].startswith("ended by SIGKILL from outside")
    killed = job.output.read_bytes()
    job.output.unlink()
    said = job.finish("18")

    assert job.output.read_bytes() == killed
    assert "already measured this run; its result is kept" in said
    assert not interrupted_path(job.output).exists()


def test_what_was_interrupted_of_another_run_does_not_count(job) -> None:
    job.end("17")
    job.finish("18", batch_size=2)

    assert (job.result().experiment.batch_size, job.messages()) == (2, [None])


def test_a_new_sweep_tries_as_often_as_the_first(job, tmp_path, monkeypatch) -> None:
    """Ctrl-C, too, has a scheduler end its jobs."""
    job.end("17")
    monkeypatch.setenv("DPPROF_PROGRESS", "set back at the end")
    Progress.start(tmp_path / "progress.jsonl", [])
    job.finish("18")

    assert (job.result().outcome, job.messages()) == ("ok", [None])


def test_copies_of_results_that_stayed_go(tmp_path) -> None:
    stays, goes = (tmp_path / "clean" / f"{name}.json.interrupted" for name in "ab")
    stays.parent.mkdir()
    for path in (stays, goes, tmp_path / "clean" / "b.json"):
        path.touch()
    drop_copies(tmp_path)

    assert (stays.exists(), goes.exists()) == (True, False)


def test_only_a_job_of_a_scheduler_is_one() -> None:
    assert scheduler_job({"SLURM_JOB_ID": "17"}) == "Slurm job 17"
    assert scheduler_job({"SLURM_JOB_ID": ""}) is None
    assert scheduler_job({"SLURM_CONF": "/etc/slurm/slurm.conf"}) is None
