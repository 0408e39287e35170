"""Runs functions in child processes, on a device that no other measurement uses meanwhile.

A child may crash, exit, hang, print without end, or start processes that would outlive it. Its
parent always learns how it ended, and none of its processes survives.
"""

import datetime as dt
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from dpprof.experiments.launch import child
from dpprof.experiments.launch.device_lock import hold_one, longest_wait_s
from dpprof.experiments.launch.device_slots import DeviceSlot
from dpprof.experiments.launch.forks import Forks
from dpprof.experiments.planning.code_digest import CodeInUse
from dpprof.experiments.records.provenance import describe_surroundings
from dpprof.system.child_output import Output, Sink
from dpprof.system.console import say
from dpprof.system.files import check_writable
from dpprof.system.paths import PACKAGE
from dpprof.system.processes import end_group, no_survivors

Answer = TypeVar("Answer")


class Terminated(SystemExit):
    """SIGTERM or SIGHUP has come; the exit status is a shell's."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Ended(NamedTuple, Generic[Answer]):
    """How a child process ended."""

    answer: Answer | None
    """The function's result; None if the child ended before the result was complete."""

    returncode: int  # the exit status, negative for a signal, as in ``subprocess``
    timed_out: bool
    output: str  # the end of what it printed
    wall_s: float
    others_busy_cores: float

    def explain(self, what: str, timeout_s: float) -> str:
        """Return why there is no answer, in words; ``what`` is the child's task, as a noun."""
        if self.timed_out:
            return f"the {what} took longer than {timeout_s:g} s"
        code = self.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the {what}'s process ended with {how} before it could answer"


class Isolation:
    """A device that this process holds, and the facts about its use that every record has."""

    def __init__(self, slot: DeviceSlot, lock_fds: list[int], code: CodeInUse) -> None:
        self.slot = slot
        self._lock_fds, self._code = lock_fds, code

    def begin(self, **variables: str) -> None:
        """Describe the surroundings of children, with variables of theirs; start the clock."""
        self._code.start()
        search_path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "PYTHONUNBUFFERED": "1"}
        self._environment = os.environ | self.slot.environment | own | variables
        self._facts = {
            "device": self.slot.describe(),
            "provenance": describe_surroundings(self._environment),
            "started_at": dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
        }
        self._start = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Stop the clock and return the facts, by field of a record.

        Returns:
            ``device``, ``provenance``, ``started_at``, ``wall_s`` and ``code_digest``.
        """
        wall_s = time.monotonic() - self._start
        return self._facts | {"wall_s": wall_s, "code_digest": self._code.settle()}

    def run(
        self,
        answer_type: type[Answer],
        function: str,
        *arguments: str | int,
        timeout_s: float,
        sink: Sink | None = None,
        pass_fds: tuple[int, ...] = (),
        forks: Forks | None = None,
    ) -> Ended[Answer]:
        """Call a function in a fresh process and return how the process ended.

        ``function`` is ``module:name``, which only the child imports; its result travels as
        JSON of ``answer_type``. After ``timeout_s`` the child counts as hung and is killed.
        Without a sink its output goes to standard error. It inherits ``pass_fds``. With ``forks``
        the process has imported already what they import.
        """
        if forks is not None:
            forks.prepare(self._environment)  # it outlives this child
        lifeline, held = os.pipe()
        # A file without a name disappears even if a process is killed.
        with tempfile.TemporaryFile() as answer, os.fdopen(lifeline, "rb"), os.fdopen(held, "wb"):
            assignment = child.Assignment(
                function=function,
                arguments=list(arguments),
                parent_pid=os.getpid(),
                lock_fds=self._lock_fds,
                lifeline_fd=lifeline,
                answer_fd=answer.fileno(),
            )
            start, others_busy_cores, timed_out = time.monotonic(), watch_others(), False
            with no_survivors():
                start_child = child.start if forks is None else forks.start
                process, printed = start_child(assignment, pass_fds, self._environment)
                output = Output(printed, sink or Sink(None))
                try:
                    process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    timed_out = True
                finally:
                    end_group(process.pid)
                    process.kill()  # it may not lead its group yet
                    process.wait()
            wall_s, others = time.monotonic() - start, others_busy_cores()
            tail = output.finish()
            answer.seek(0)
            content = answer.read()
        try:
            result = TypeAdapter(answer_type).validate_json(content)
        except ValidationError:  # the child ended before it was complete
            result = None
        return Ended(result, process.returncode, timed_out, tail, wall_s, others)


@contextmanager
def isolate(
    output: Path | None,
    slots: Sequence[DeviceSlot],
    digest: Callable[[], str],
    module: str,
    *,
    longest_s: float | None = None,
    why_not: Callable[[int, int], str | None] | None = None,
) -> Iterator[Isolation]:
    """Hold the first free device; if none is free, say which process holds it, and wait.

    Inside the context, SIGTERM and SIGHUP raise ``Terminated``, so that children are ended too.
    Only the first does: what is done about it is not interrupted again.

    ``output`` is the file that will be written, if any; ``slots`` are interchangeable. ``digest``
    returns the digest of the code that will run; ``module`` is the calling module's file, imported
    already. ``longest_s`` and ``why_not`` are those of ``hold_one``; the wait is
    ``DPPROF_MAX_WAIT_S`` where it is not given.

    Raises:
        OSError: The file cannot be written.
        DeviceBusyError: No device became free in that time.
        InputError: ``DPPROF_MAX_WAIT_S`` is no number of seconds.
    """
    if output is not None:
        check_writable(output)
    code = CodeInUse(digest, module)
    device = "the CPU" if "cpu" in slots[0].locks else "every visible GPU"

    def tell_wait(whom: str, waited_s: float) -> None:
        minutes = int(waited_s // 60)
        still = f" after {minutes} min still" if minutes else ""
        say(f"{device} is taken;{still} waiting for {whom}")

    held = hold_one(
        [slot.locks for slot in slots],
        tell_wait,
        shared=slots[0].shared,
        longest_s=longest_wait_s() if longest_s is None else longest_s,
        why_not=why_not,
    )
    with ended_by_signals(), held as (position, lock_fds):
        yield Isolation(slots[position], lock_fds, code)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP into ``Terminated``."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        for handled in before:
            signal.signal(handled, signal.SIG_IGN)
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_others() -> Callable[[], float]:
    """Return a function for the average number of cores that others keep busy from now on.

    All time that is not this process's children's counts as others': other programs, the kernel,
    and on a virtual machine the hypervisor; 0.01 is negligible. Wait for the one child before the
    call, because its time counts only then.
    """
    since_s, before_s = time.monotonic(), _busy_s() - _children_s()
    return lambda: (_busy_s() - _children_s() - before_s) / (time.monotonic() - since_s)


def _busy_s() -> float:
    """Return the busy seconds of all cores together since boot."""
    times = psutil.cpu_times()._asdict()
    # Linux counts a guest's time as user time as well.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(value for name, value in times.items() if name not in idle))


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
