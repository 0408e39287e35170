"""Children that share one process's imports, for predictions: they measure nothing.

A server process imports what all of them need, and forks one for each. It ends with this process.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import IO, Any

from dpprof.experiments.launch.child import Assignment, carry_out

_MADE = 100_000
"""How many objects are made before garbage is collected: little of what traces make is garbage."""


class Forks:
    """Forks children from one server process, which starts with the first child.

    Args:
        modules: What the server imports; one that cannot be imported is left out.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["dpprof.experiments.launch.uncollected", *modules])

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start the server in an environment, if it does not run yet."""
        with _lock, _environment(environment):
            resource_tracker.ensure_running()
            forkserver.ensure_running()

    def start(
        self, assignment: Assignment, pass_fds: tuple[int, ...], environment: Mapping[str, str]
    ) -> tuple["Forked", IO[bytes]]:
        """Start a child in a session of its own; return it, and what it prints.

        Its environment is that in which the server was started.
        """
        self.prepare(environment)
        printed, end = os.pipe()
        files = map(_Descriptors, (assignment.descriptors, pass_fds, (end,)))
        process = self._context.Process(target=_carry_out, args=(assignment, *files))
        with _lock, _without_main():
            process.start()
        os.close(end)
        return Forked(process), os.fdopen(printed, "rb")


_lock = threading.Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let processes that are started within inherit variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Let no child that starts within run this process's script again, as multiprocessing does."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Forked:
    """A forked child, with the part of ``subprocess.Popen`` that is needed."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int:
        """The exit status, negative for a signal, as in ``subprocess``."""
        return int(self._process.exitcode)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not, after so many seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        self._process.kill()


class _Descriptors:
    """Open files that travel to a child, where they have other numbers."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self.numbers = tuple(descriptors)
        self._received: list[Any] = []

    def __getstate__(self) -> Any:
        return self.numbers, [DupFd(number) for number in self.numbers]

    def __setstate__(self, state: Any) -> None:
        self.numbers, self._received = state

    def receive(self) -> dict[int, int]:
        """Return the numbers here by the numbers there."""
        here = (descriptor.detach() for descriptor in self._received)
        return dict(zip(self.numbers, here, strict=True))


def _carry_out(
    assignment: Assignment, own: _Descriptors, passed: _Descriptors, output: _Descriptors
) -> None:
    os.setsid()
    [printed] = output.receive().values()
    for standard in (sys.stdout, sys.stderr):
        os.dup2(printed, standard.fileno())
    os.close(printed)
    gc.freeze()  # what the server has imported is no garbage, and is shared
    gc.set_threshold(_MADE)
    gc.enable()
    here, arguments = own.receive(), passed.receive()
    lifeline = assignment.lifeline_fd
    carry_out(
        assignment.model_copy(
            update={
                "lock_fds": [here[number] for number in assignment.lock_fds],
                "lifeline_fd": None if lifeline is None else here[lifeline],
                "answer_fd": here[assignment.answer_fd],
                "arguments": [
                    arguments.get(argument, argument) if isinstance(argument, int) else argument
                    for argument in assignment.arguments
                ],
            }
        )
    )
