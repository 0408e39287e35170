"""A machine-wide lock that allows one experiment at a time on a device.

The lock is ``flock`` on a file, held by an open descriptor that a worker inherits. It is free when
both processes have ended, however they ended. The worker's own children do not inherit it.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dpprof.system.lock_holders import name_holders

_POLL_S = 0.1
_VARIABLE = "DPPROF_LOCK_DIR"


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


def keep_to_this_process(descriptor: int) -> None:
    """Prevent children of this process from inheriting the lock, since they may outlive it."""
    os.set_inheritable(descriptor, False)
    held = [descriptor]

    def let_go() -> None:
        while held:  # once: a child's own children may have another file of that number
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)


def who_holds(devices: Iterable[str]) -> str:
    """Return the processes that hold the locks of devices, for a message."""
    return name_holders(map(lock_path, devices))


@contextlib.contextmanager
def hold_one(
    devices: Sequence[str], waiting: Callable[[], None], *, shared: bool = False
) -> Iterator[tuple[int, int]]:
    """Hold the lock of the first free device; wait while none is free.

    ``waiting`` is called once if all are taken. With ``shared``, others with ``shared`` may
    hold the lock too.

    Yields:
        The position of the device, and the descriptor to pass to a child.
    """
    descriptors = [_open(lock_path(device)) for device in devices]
    try:
        position = _lock_first_free(descriptors, shared=shared)
        if position is None:
            waiting()
        while position is None:
            time.sleep(_POLL_S)
            position = _lock_first_free(descriptors, shared=shared)
        yield position, descriptors[position]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _lock_first_free(descriptors: Sequence[int], *, shared: bool) -> int | None:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    for position, descriptor in enumerate(descriptors):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return position
    return None
