"""What the supervisor and its worker hand each other, across the process boundary."""

import mmap
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dpprof.records.result import PHASES, Failure, Measurement, Outcome, Phase
from dpprof.spec.experiment import Experiment

TRACES = "DPPROF_TRACES"
"""Names the environment variable that holds the folder for traces."""


def traces_folder() -> Path | None:
    """Tell a worker where its instrument may leave traces; None where nowhere."""
    folder = os.environ.get(TRACES)
    return Path(folder) if folder else None


class Assignment(BaseModel):
    """What a worker is told, as its one command-line argument."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: Experiment
    instrument: str
    supervisor_pid: int
    phase_fd: int
    report_fd: int
    lock_fd: int


class Report(BaseModel):
    """What a worker that lives to the end writes back."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Outcome
    measurement: Measurement | None = None
    error: Failure | None = None


class PhaseMark:
    """One byte, shared by two processes, that says which phase is under way.

    Setting it is a store to memory, so it costs a timed step nothing; the file behind
    it survives the process, so the last phase of a killed worker is known.
    """

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size == 0:
            os.write(descriptor, b"\0")
        self._byte = mmap.mmap(descriptor, 1)

    def enter(self, phase: Phase) -> None:
        """Mark the beginning of a phase."""
        self._byte[0] = PHASES.index(phase)

    def read(self) -> Phase:
        """Tell the phase marked last; ``setup`` before any was."""
        return PHASES[self._byte[0]]
