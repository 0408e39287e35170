"""Ends a process and its descendants together (Linux; elsewhere a child may survive)."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

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
