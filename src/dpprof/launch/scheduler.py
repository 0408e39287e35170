"""Tells whether a cluster's scheduler runs this process, and may end it."""

import os
import signal
from collections.abc import Mapping

from dpprof.records.result import Failure
from dpprof.records.terms import Phase

_SCHEDULERS = {"SLURM_JOB_ID": "Slurm"}
"""The scheduler's name, by the environment variable that holds its job's number."""


def scheduler_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the scheduler's job that this process belongs to; None outside of one.

    Example:
        >>> scheduler_job({"SLURM_JOB_ID": "17"})
        'Slurm job 17'
        >>> scheduler_job({}) is None
        True
    """
    for variable, name in _SCHEDULERS.items():
        if number := environment.get(variable):
            return f"{name} job {number}"
    return None


def describe_end(job: str, number: int, phase: Phase) -> Failure:
    """Return the failure of an attempt whose job the scheduler has ended with a signal."""
    return Failure(
        kind="Scheduler",
        message=f"the scheduler ended {job}: it was cancelled or preempted, or its time was over",
        phase=phase,
        signal=signal.Signals(number).name,
    )
