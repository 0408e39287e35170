"""A worker's report to its parent, and the judgement of one that ended without a report."""

import mmap
import os
import re
import signal
from pathlib import Path

from pydantic import BaseModel

from dpprof.experiments.records.result import Failure, Measurement
from dpprof.experiments.records.terms import PHASES, Outcome, Phase
from dpprof.system.messages import requested_bytes, says_out_of_memory, shorten

TRACES = "DPPROF_TRACES"  # the environment variable that holds the folder for traces


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


_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_TOLD = re.compile(r"(?:what\(\):|(?=CUDA error:))\s*(.+)")
"""The message of an uncaught C++ exception, or of a CUDA error."""

_DUMP = "Fatal Python error: "
"""The beginning of faulthandler's dump, before Python's frames and a list of extension modules."""

_FRAME = re.compile(r"\(most recent call first\):\s*(File .+)")
_NO_WORDS = re.compile(r"frame #\d|Extension modules: |\(no Python frame\)")


def judge_death(
    returncode: int, phase: Phase, tail: str, *, limited: bool
) -> tuple[Outcome, Failure]:
    """Return the outcome and failure of a process that ended without a report.

    ``returncode`` is as in ``subprocess``, negative for a signal; ``tail`` is the end of the
    output.
    """
    number, name = -returncode, None
    if number > 0:
        try:
            name = signal.Signals(number).name
        except ValueError:  # a real-time signal
            name = f"signal {number}"
    outcome: Outcome = "crashed"
    kind, message = name or f"exit code {returncode}", _last_words(tail, number)
    if "std::bad_alloc" in tail:
        outcome, kind = "oom", "std::bad_alloc"
    elif number in _FROM_OUTSIDE:
        outcome, message = "killed", f"ended by {name} from outside"
        if number == signal.SIGKILL:
            message += ", for example by the kernel when the host runs out of memory"
    elif says_out_of_memory(message, limited=limited):
        outcome = "oom"
    return outcome, Failure(
        kind=kind,
        message=shorten(message),
        phase=phase,
        signal=name,
        exit_code=None if name else returncode,
        requested_bytes=requested_bytes(message) if outcome == "oom" else None,
    )


def _last_words(tail: str, number: int) -> str:
    """Return the process's own message about its end.

    After a signal it is the message of C++ or CUDA, or after an abort the last line before
    Python's dump. A process that was interrupted printed none, so the dump is used.
    """
    said, dumped, dump = tail.rpartition(_DUMP)
    if not dumped:
        said, dump = tail, ""
    if number > 0 and (told := _TOLD.findall(said)):
        return str(told[-1]).strip()
    lines = [line.strip() for line in said.splitlines()]
    lines = [line for line in lines if line and not _NO_WORDS.match(line)]
    if lines and (not dumped or number == signal.SIGABRT):
        return lines[-1]
    if not dumped:
        return "ended without output"
    frame = _FRAME.search(dump)
    return dump.partition("\n")[0].strip() + (f", {frame.group(1).strip()}" if frame else "")
