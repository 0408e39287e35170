"""Finds the processes that hold a lock, for messages to those that wait."""

import datetime as dt
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from dpprof.system.messages import escape

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
