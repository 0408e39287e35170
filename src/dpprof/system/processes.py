"""Processes: which hold a lock, and how one ends with its descendants (on Linux)."""

import ctypes
import datetime as dt
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dpprof.system.messages import escape

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the supervisor is gone")


def end_group_with(lifeline: int) -> None:
    """Start a process of this group that kills the group when the other end of a pipe closes.

    The kernel kills this process with its parent, but not the processes that it has started.

    ``lifeline`` is the reading end; only the parent has the other.
    """
    if os.fork():
        return
    try:
        for descriptor in {int(entry.name) for entry in Path("/dev/fd").iterdir()} - {lifeline}:
            with suppress(OSError):
                os.close(descriptor)
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


def end_group(leader_pid: int) -> None:
    """Kill the remaining processes of the group that a process leads or led."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)


@contextmanager
def no_survivors() -> Iterator[None]:
    """Kill all remaining descendants of a child, including those outside its group.

    Inside the context, orphans become children of this process, so descendants that left the
    child's group are found when the child is gone. This works in the main thread only, because
    callers in other threads may have started children meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = psutil.Process()
    others = set(own.children())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        while left := set(own.children()) - others:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    process.wait()
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


_PROC = Path("/proc")
_COMMAND_LIMIT = 160


def name_holders(paths: Iterable[Path]) -> str:
    """Return the processes that hold ``flock`` on files, with their commands and start times.

    If no process is visible, as in another container, the text says so.
    """
    holders = {process.pid: process for path in paths for process in _find(path)}
    return " and ".join(map(_tell, holders.values())) or "a process that cannot be seen from here"


def _find(path: Path) -> Iterator[psutil.Process]:
    """Yield the processes that took the lock; if they are gone, those that inherited it."""
    try:
        file = path.stat()
        held = (_PROC / "locks").read_text(encoding="ascii")
    except OSError:
        return
    number = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    # A waiting request has an arrow before it and does not match.
    takers = re.findall(rf"^\d+: FLOCK +\w+ +\w+ +(\d+) {number} ", held, re.MULTILINE)
    alive = [int(pid) for pid in takers if psutil.pid_exists(int(pid))]
    for pid in alive or _heirs(path):
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _heirs(path: Path) -> Iterator[int]:
    """Yield the processes whose descriptor of the file has a lock."""
    for link in _PROC.glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == path:
                told = (link.parents[1] / "fdinfo" / link.name).read_text(encoding="ascii")
                if "FLOCK" in told:
                    yield int(link.parents[1].name)


def _tell(process: psutil.Process) -> str:
    try:
        command = escape(" ".join(process.cmdline()))
        started = dt.datetime.fromtimestamp(process.create_time()).astimezone()
    except psutil.Error:
        return f"process {process.pid}"
    since = started.isoformat(sep=" ", timespec="seconds")
    return f"process {process.pid} ({ascii(command)[1:-1][:_COMMAND_LIMIT]}), running since {since}"
