"""A sweep on a real Slurm: it is killed, its jobs are cancelled, and it ends in a report.

A job costs the start of two snakemakes, so there are few of them.
"""

import datetime as dt
import itertools
import json
import signal
from collections import defaultdict
from typing import Any

import pytest
from children import wait_for
from slurm.cluster import Cluster
from slurm.conftest import SlurmCheckout

pytestmark = pytest.mark.workflow

BESIDE, FAILS = (1, 2), 4
CANCELLED_AND_OUT_OF_TIME, REQUEUED = 5, 6
"""Batch sizes, by what becomes of their runs."""


class Story:
    """What became of the sweep."""

    def __init__(self, checkout: SlurmCheckout, cluster: Cluster) -> None:
        self.checkout, self._cluster = checkout, cluster
        self.jobs: dict[int, list[str]] = defaultdict(list)
        """The jobs in which a run has begun, by batch size."""
        self.finished = self._kill_snakemake()
        self._go_on()

    def _kill_snakemake(self) -> dict[str, bytes]:
        """Kill it while runs are under way; returns the results that are there at the end."""
        self.checkout.plan(*BESIDE, FAILS)
        sweep = self.checkout.sweep()
        wait_for(lambda: len(self.checkout.begun()) == len(BESIDE), seconds=300)
        sweep.send_signal(signal.SIGKILL)
        sweep.wait(timeout=60)
        for batch_size in BESIDE:
            self.checkout.let_go(batch_size)
        wait_for(self._cluster.is_idle, seconds=300)
        return self._contents()

    def _go_on(self) -> None:
        """Ask for more runs, and do something to each job that begins."""
        to_do = {
            CANCELLED_AND_OUT_OF_TIME: [self._cluster.cancel, self._cluster.end_by_time_limit],
            REQUEUED: [self._cluster.requeue],
        }
        seen = set(self.checkout.begun())
        self.checkout.plan(*BESIDE, FAILS, *to_do)
        self.checkout.snakemake("--unlock")
        sweep = self.checkout.sweep()

        def act() -> bool:
            for batch_size, process in set(self.checkout.begun()) - seen:
                seen.add((batch_size, process))
                job = self._cluster.job_of(process)
                self.jobs[batch_size].append(job)
                if to_do[batch_size]:
                    to_do[batch_size].pop(0)(job)
                else:
                    self.checkout.let_go(batch_size)
            return sweep.poll() is not None

        try:
            wait_for(act, seconds=500)
        finally:
            sweep.send_signal(signal.SIGINT)
            sweep.wait(timeout=60)
        assert sweep.returncode == 0, self.checkout.said.read_text()

    def _contents(self) -> dict[str, bytes]:
        return {name: content for name, (_, content) in self.checkout.results().items()}

    def result(self, batch_size: int) -> dict[str, Any]:
        (path,) = (self.checkout.path / "results" / "clean").glob(f"*-b{batch_size}-*.json")
        return json.loads(path.read_text())

    def outcomes(self, batch_size: int) -> list[str]:
        return [attempt["outcome"] for attempt in self.result(batch_size)["attempts"]]


def test_a_sweep_survives_what_befalls_its_jobs_and_its_snakemake(
    on_cluster: SlurmCheckout, cluster: Cluster
) -> None:
    """One sweep shows it all: two processes that share the tests would each have one."""
    story = Story(on_cluster, cluster)

    several_gpus_work_at_once_and_each_has_one_job(story)
    what_outlives_a_killed_snakemake_is_kept(story)
    a_failing_experiment_is_a_row_of_the_report(story)
    what_the_scheduler_ends_twice_is_killed_and_its_log_is_found(story)
    a_job_that_is_requeued_goes_on_under_its_number(story)
    no_copy_of_an_interrupted_result_is_left(story)


def several_gpus_work_at_once_and_each_has_one_job(story: Story) -> None:
    by_gpu = defaultdict(list)
    for content in story.finished.values():
        result = json.loads(content)
        by_gpu[result["device"]["uuid"]].append(interval(result))
    at_work = [interval(story.result(batch_size)) for batch_size in BESIDE]

    assert len({story.result(batch_size)["device"]["uuid"] for batch_size in BESIDE}) == 2
    assert max(start for start, _ in at_work) < min(end for _, end in at_work)
    for intervals in by_gpu.values():
        for earlier, later in itertools.pairwise(sorted(intervals)):
            assert earlier[1] <= later[0]


def interval(result: dict[str, Any]) -> tuple[dt.datetime, dt.datetime]:
    start = dt.datetime.fromisoformat(result["started_at"])
    return start, start + dt.timedelta(seconds=result["wall_s"])


def what_outlives_a_killed_snakemake_is_kept(story: Story) -> None:
    assert len(story.finished) == len(BESIDE) + 1
    assert story.finished.items() <= story._contents().items()


def a_failing_experiment_is_a_row_of_the_report(story: Story) -> None:
    runs = story.checkout.table("runs").set_index("batch_size")
    assert runs.loc[FAILS, "outcome"] == "crashed"
    assert runs.loc[list(BESIDE), "outcome"].tolist() == ["ok"] * len(BESIDE)
    assert "this experiment fails" in story.checkout.report()


def what_the_scheduler_ends_twice_is_killed_and_its_log_is_found(story: Story) -> None:
    batch_size = CANCELLED_AND_OUT_OF_TIME
    result, jobs = story.result(batch_size), story.jobs[batch_size]
    assert len(set(jobs)) == 2
    assert (result["outcome"], story.outcomes(batch_size)) == ("killed", ["killed", "killed"])
    for attempt, job in zip(result["attempts"], jobs, strict=True):
        assert attempt["error"]["message"].startswith(f"the scheduler ended Slurm job {job}:")
        assert attempt["error"]["phase"] == "backward"

    (row,) = [
        line
        for line in story.checkout.report().splitlines()
        if line.startswith(f"| {result['experiment_id']} clean r0")
    ]
    assert "| killed |" in row
    assert result["error"]["log"] in row
    log = (story.checkout.path / result["error"]["log"]).read_text()
    assert all(f"the scheduler ended Slurm job {job}:" in log for job in jobs)
    slurm_logs = (story.checkout.path / ".snakemake" / "slurm_logs").rglob("*.log")
    assert {*jobs} <= {path.stem for path in slurm_logs}


def a_job_that_is_requeued_goes_on_under_its_number(story: Story) -> None:
    assert len(set(story.jobs[REQUEUED])) == 1
    assert story.outcomes(REQUEUED) == ["killed", "ok"]


def no_copy_of_an_interrupted_result_is_left(story: Story) -> None:
    assert not list(story.checkout.path.glob("results/**/*.interrupted"))
