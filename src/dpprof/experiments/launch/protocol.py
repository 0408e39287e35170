"""The data that the supervisor and its worker exchange."""

import mmap
import os
from pathlib import Path

from pydantic import BaseModel

from dpprof.experiments.records.result import Failure, Measurement
from dpprof.experiments.records.terms import PHASES, Outcome, Phase

TRACES = "DPPROF_TRACES"
"""The environment variable that holds the folder for traces."""


def traces_folder() -> Path | None:
    """Return the folder in which a worker's instrument may write traces; None if there is none."""
    folder = os.environ.get(TRACES)
    return Path(folder) if folder else None


class WorkerAnswer(BaseModel, frozen=True, extra="forbid"):
    """The outcome of a run, which a worker writes at its end."""

    outcome: Outcome
    measurement: Measurement | None = None
    error: Failure | None = None


class PhaseMark:
    """One byte, shared by two processes, that holds the present phase.

    Setting it is a store to memory, so it adds no time to a step. The file behind it survives the
    process, so the last phase of a killed worker is known.
    """

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size == 0:
            os.write(descriptor, b"\0")
        self._byte = mmap.mmap(descriptor, 1)

    def enter(self, phase: Phase) -> None:
        """Mark the beginning of a phase."""
        self._byte[0] = PHASES.index(phase)

    def read(self) -> Phase:
        """Return the phase marked last; ``setup`` before the first mark."""
        return PHASES[self._byte[0]]
