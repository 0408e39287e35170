"""Judges how a process without a report ended, by its exit status and last output."""

import re
import signal

from dpprof.experiments.records.result import Failure
from dpprof.experiments.records.terms import Outcome, Phase
from dpprof.system.messages import shorten
from dpprof.system.out_of_memory import requested_bytes, says_out_of_memory

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
    number = -returncode
    name = _signal_name(number) if number > 0 else None
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
