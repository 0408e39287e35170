"""Machine-wide locks that allow one experiment at a time on a device.

A lock is ``flock`` on a file, held by an open descriptor that a worker inherits. It is free when
both processes have ended, however they ended. The worker's own children do not inherit it.
"""

import contextlib
import fcntl
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dpprof.experiments.config.validation import refuse
from dpprof.experiments.planning.job_resources import WAIT_UNDER_A_SCHEDULER_S
from dpprof.system.processes import name_holders

_POLL_S = 0.1
_LOOK_S = 1.0
"""Seconds between looks at devices, which cost more than a look at locks."""

_VARIABLE = "DPPROF_LOCK_DIR"

MAX_WAIT = "DPPROF_MAX_WAIT_S"
"""The environment variable with the longest wait for a device, in seconds."""

_FIRST_S, _RAREST_S = 60.0, 3600.0


class DeviceBusyError(Exception):
    """No device became free in the time that there was; the message says who uses them."""


def lock_path(device: str) -> Path:
    """Return the lock file of a device, such as ``/tmp/dpprof-cpu.lock``.

    The folder is ``/tmp``, because ``TMPDIR`` may differ between users of one machine.
    ``DPPROF_LOCK_DIR`` changes it, if set and not empty.
    """
    folder = Path(os.environ.get(_VARIABLE) or "/tmp")  # noqa: S108 (machine-wide on purpose)
    return folder / f"dpprof-{re.sub(r'[^A-Za-z0-9-]', '_', device)}.lock"


def _open(path: Path) -> int:
    """Open a lock file, which another user may own; read access is enough for ``flock``.

    Raises:
        OSError: It cannot be created; the message names the variable that changes its folder.
    """
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        why = f"{error.strerror}; dpprof needs a lock file there, or in the folder {_VARIABLE}"
        raise OSError(error.errno, why, str(path)) from None
    os.fchmod(descriptor, 0o644)  # regardless of the umask, so that other users can open it
    return descriptor


def keep_to_this_process(descriptors: Iterable[int]) -> None:
    """Prevent children of this process from inheriting locks, since they may outlive it."""
    held = list(descriptors)
    for descriptor in held:
        os.set_inheritable(descriptor, False)

    def let_go() -> None:
        while held:  # once: a child's own children may have another file of that number
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)


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


def longest_wait_s(stated: str | None = None) -> float:
    """Return how long to wait for a device, in seconds; without a limit it is infinite.

    ``stated``, the value of ``--max-wait-s``, comes before ``DPPROF_MAX_WAIT_S``.

    Raises:
        InputError: The value is no number of seconds; the message names option or variable.
    """
    for key, text in (("--max-wait-s", stated), (MAX_WAIT, os.environ.get(MAX_WAIT))):
        if text:
            if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
                raise refuse(key, text, "it must be a number of seconds from 0, such as 600")
            return float(text)
    return WAIT_UNDER_A_SCHEDULER_S if scheduler_job() else math.inf


def wait_for(
    look: Callable[[], int | None],
    tell: Callable[[float], None],
    *,
    longest_s: float,
    every_s: float,
) -> int | None:
    """Look until something is found and return it; None if ``longest_s`` seconds were not enough.

    ``tell`` is called with the seconds waited so far: at the second look, after 1, 2, 4 ...
    minutes, and then every hour, so that a log of a night says what is waited for.
    """
    start_s, due_s = time.monotonic(), every_s
    while (result := look()) is None:
        waited_s = time.monotonic() - start_s
        if waited_s >= longest_s:
            return None
        if waited_s >= due_s:
            tell(waited_s)
            due_s = max(_FIRST_S, min(2 * due_s, due_s + _RAREST_S))
        time.sleep(min(every_s, longest_s - waited_s))
    return result


@contextlib.contextmanager
def hold_one(
    devices: Sequence[Sequence[str]],
    waiting: Callable[[str, float], None],
    *,
    shared: bool = False,
    longest_s: float = math.inf,
    why_not: Callable[[int, int], str | None] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Hold the locks of the first free device; wait while none is free.

    Args:
        devices: The names of each device's locks.
        waiting: Called with who is waited for, and the seconds so far, at growing intervals.
        shared: Whether others that share a lock may hold it too.
        longest_s: The most seconds to wait.
        why_not: Returns who else keeps a device busy whose locks are free, or None if it will
            do, from its position and the number of devices before it that will not do either.

    Yields:
        The position of the device, and the descriptors to pass to a child.

    Raises:
        DeviceBusyError: Nothing was free in that time.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    in_the_way: list[str] = []
    users: list[str] = []

    def look() -> int | None:
        in_the_way.clear()
        users.clear()
        for position, locks in enumerate(devices):
            if (name := _take(files, locks, how)) is not None:
                in_the_way.append(name)
            elif why_not is None or (user := why_not(position, len(users))) is None:
                return position
            else:
                _let_go(files, locks)
                users.append(user)
        return None

    def tell_whom() -> str:
        holders = [name_holders(map(lock_path, dict.fromkeys(in_the_way)))] if in_the_way else []
        return " and ".join([*holders, *users])

    with _open_all(name for locks in devices for name in locks) as files:
        position = wait_for(
            look,
            lambda waited_s: waiting(tell_whom(), waited_s),
            longest_s=longest_s,
            every_s=_LOOK_S if why_not else _POLL_S,
        )
        if position is None:
            named = ", ".join(dict.fromkeys(in_the_way) or files)
            raise DeviceBusyError(
                f"{named}: still taken after {longest_s:,g} s, by {tell_whom()}; "
                f"{MAX_WAIT} says how many seconds to wait"
            )
        yield position, [files[name] for name in devices[position]]


@contextlib.contextmanager
def _open_all(names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Open the files of locks, each once, and close them at the end, which releases the locks."""
    files: dict[str, int] = {}
    with contextlib.ExitStack() as closing:
        for name in dict.fromkeys(names):
            files[name] = _open(lock_path(name))
            closing.callback(os.close, files[name])
        yield files


def _take(files: Mapping[str, int], locks: Sequence[str], how: int) -> str | None:
    """Take all locks of a device and return None; or take none, and return one that is held."""
    for name in locks:
        try:
            fcntl.flock(files[name], how | fcntl.LOCK_NB)
        except BlockingIOError:
            _let_go(files, locks)
            return name
    return None


def _let_go(files: Mapping[str, int], locks: Sequence[str]) -> None:
    for name in locks:
        fcntl.flock(files[name], fcntl.LOCK_UN)
