"""Tells whether a cluster's scheduler runs this process, and keeps the attempts that it ended.

Snakemake deletes the result of a job that failed, and for a scheduler a job that it has ended has
failed, whatever the job still did. So a copy of the result stays beside it until a job ends well.
"""

import datetime as dt
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Failure, Result, interrupted_path, read_result
from dpprof.experiments.records.terms import Outcome, Phase

MAX_ATTEMPTS = 2
"""A run that crashed or was killed is tried again in a fresh process; other outcomes are final."""

RETRIED: tuple[Outcome, ...] = ("crashed", "killed")


def scheduler_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the scheduler's job that this process belongs to; None outside of one.

    Example:
        >>> scheduler_job({"SLURM_JOB_ID": "17"})
        'Slurm job 17'
        >>> scheduler_job({}) is None
        True
    """
    number = environment.get("SLURM_JOB_ID")
    return f"Slurm job {number}" if number else None


def describe_end(job: str, number: int, phase: Phase) -> Failure:
    """Return the failure of an attempt whose job the scheduler has ended with a signal."""
    return Failure(
        kind="Scheduler",
        message=f"the scheduler ended {job}: it was cancelled or preempted, or its time was over",
        phase=phase,
        signal=signal.Signals(number).name,
    )


def is_interrupted(result: Result) -> bool:
    """Return whether a run has attempts left."""
    return result.outcome in RETRIED and len(result.attempts) < MAX_ATTEMPTS


def drop_copies(results: Path) -> None:
    """Delete the copies of results that are there, since their jobs did end well after all."""
    for copy in results.glob(str(interrupted_path(Path("*/*.json")))):
        if copy.with_suffix("").exists():
            copy.unlink()


def read_earlier(
    output: Path, asked: tuple[str, str, int], digest: Callable[[], str], since_s: float
) -> Result | None:
    """Return the result of an earlier job, from its file or its copy; None if there is none.

    A copy that has no attempts left takes the place of the result that Snakemake has deleted.

    ``asked`` is what the result must be of: spec digest, instrument and replicate; ``digest``
    returns the present code's. What was interrupted before ``since_s``, in seconds since 1970, does
    not count.
    """
    interrupted = None
    for path in (output, interrupted_path(output)):
        try:
            result = read_result(path)
        except (FileNotFoundError, ResultError):
            continue
        run = (result.spec_digest, result.instrument, result.replicate)
        if run != asked or result.code_digest != digest():
            continue
        is_final = not is_interrupted(result)
        if path == output and is_final:
            return result
        if dt.datetime.fromisoformat(result.started_at).timestamp() < since_s:
            continue
        if is_final:
            path.replace(output)
            return result
        interrupted = interrupted or result
    return interrupted
