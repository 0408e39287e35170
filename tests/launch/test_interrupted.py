"""What a scheduler's SIGTERM leaves, and what the next job makes of it."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from children import wait_for
from factory import make_experiment
from fake_gpus import profile_command

from dpprof.experiments.launch.device_lock import scheduler_job
from dpprof.experiments.launch.isolated import Ended, Isolation, Terminated
from dpprof.experiments.launch.supervisor import supervise
from dpprof.experiments.launch.worker_report import WorkerAnswer
from dpprof.experiments.records.result import Result, drop_copies, interrupted_path, read_result


class Job:
    """Jobs of Slurm that supervise a run in this process; what their workers do is invented."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output, self.log = folder / "x.json", folder / "x.log"
        self._monkeypatch = monkeypatch
        self.worked = 0

    def _supervise(self, number: str, batch_size: int = 1, since_s: float = 0.0) -> None:
        self._monkeypatch.setenv("SLURM_JOB_ID", number)
        experiment = make_experiment(batch_size=batch_size)
        supervise(experiment, "clean", 0, self.output, self.log, keep=True, since_s=since_s)

    def end(self, number: str) -> None:
        """Have the scheduler end a job in its work."""

        def work(*_, **__):
            raise Terminated(signal.SIGTERM)

        self._monkeypatch.setattr(Isolation, "run", work)
        with pytest.raises(Terminated):
            self._supervise(number)

    def finish(self, number: str, *, returncode: int = 0, **options) -> None:
        """Let a job end by itself, and its worker with a status."""
        answer = None if returncode else WorkerAnswer(outcome="ok")

        def work(*_, **__):
            self.worked += 1
            return Ended(answer, returncode, False, "", 1.0, 0.0)

        self._monkeypatch.setattr(Isolation, "run", work)
        self._supervise(number, **options)

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
def test_a_schedulers_sigterm_leaves_a_complete_killed_result(
    tmp_path, plugin, monkeypatch, worker_first
) -> None:
    """Here in a process of its own, which gets the signal."""
    output, log, marker = (tmp_path / name for name in ("x.json", "x.log", "reached"))
    monkeypatch.setenv("DPPROF_TEST_MARKER", str(marker))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    command = profile_command(output, "--instrument=test-waits", f"--log={log}", "--keep")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(marker.exists)
    (worker,) = psutil.Process(process.pid).children()
    if worker_first:
        worker.terminate()
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 128 + signal.SIGTERM
    assert not worker.is_running()
    result = read_result(output)
    assert (result.outcome, len(result.attempts)) == ("killed", 1)
    assert (result.error.kind, result.error.signal) == ("Scheduler", "SIGTERM")
    assert (result.error.message, result.error.phase) == (ended("17"), "setup")
    assert result.error.log == str(log)
    assert "attempt 1: killed" in log.read_text()
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


def test_a_run_that_is_ended_twice_is_final(job, capsys) -> None:
    job.end("17")  # and its Snakemake is gone too: nobody deletes the result
    job.end("18")
    job.output.unlink()
    job.log.unlink()
    job.finish("19")

    result = job.result()
    assert (result.outcome, job.messages()) == ("killed", [ended("17"), ended("18")])
    assert "already measured this run; its result is kept" in capsys.readouterr().err
    assert job.worked == 0
    assert ended("17") in job.log.read_text()
    assert ended("18") in job.log.read_text()
    assert not interrupted_path(job.output).exists()


def test_a_job_that_may_have_failed_for_its_memory_loses_no_result(job, capsys) -> None:
    job.finish("17", returncode=-signal.SIGKILL)
    assert job.messages()[1].startswith("ended by SIGKILL from outside")
    killed = job.output.read_bytes()
    job.output.unlink()
    job.finish("18")

    assert job.output.read_bytes() == killed
    assert "already measured this run; its result is kept" in capsys.readouterr().err
    assert not interrupted_path(job.output).exists()


def test_what_was_interrupted_of_another_run_does_not_count(job) -> None:
    job.end("17")
    job.finish("18", batch_size=2)

    assert (job.result().experiment.batch_size, job.messages()) == (2, [None])


def test_a_new_sweep_tries_as_often_as_the_first(job) -> None:
    """Ctrl-C, too, has a scheduler end its jobs."""
    job.end("17")
    job.finish("18", since_s=time.time())

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
