"""The child process of a measurement: calls one function and writes its answer.

Its parent starts it as ``python -m dpprof.experiments.launch.child ASSIGNMENT``.
"""

import faulthandler
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, NoReturn

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dpprof.experiments.launch.device_lock import keep_to_this_process
from dpprof.system.imports import collecting_no_garbage
from dpprof.system.messages import escape_all
from dpprof.system.processes import die_with, end_group_with


class Assignment(BaseModel, frozen=True, extra="forbid"):
    """What a child has to do, its only command-line argument."""

    function: str  # the function to call, as ``module:name``; only the child imports it
    arguments: list[str | int]
    parent_pid: int
    lock_fds: list[int]
    lifeline_fd: int | None = None
    """A pipe that closes when the parent dies; None where the parent's own group ends with it."""

    answer_fd: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The files that the child inherits."""
        lifeline = () if self.lifeline_fd is None else (self.lifeline_fd,)
        return (*self.lock_fds, *lifeline, self.answer_fd)


def start(
    assignment: Assignment,
    pass_fds: tuple[int, ...],
    environment: Mapping[str, str],
    *,
    new_session: bool = True,
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a child in an interpreter of its own; return it, and what it prints."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, assignment.model_dump_json()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(*assignment.descriptors, *pass_fds),
        start_new_session=new_session,
        env=environment,
    )
    assert process.stdout is not None
    return process, process.stdout


def main() -> None:
    """Carry out the assignment on the command line."""
    assignment = Assignment.model_validate_json(sys.argv[1])
    die_with(assignment.parent_pid)
    carry_out(assignment)


def carry_out(assignment: Assignment) -> NoReturn:
    """Call the function and write its answer; this process ends with the assignment."""
    faulthandler.enable()
    if assignment.lifeline_fd is not None:
        end_group_with(assignment.lifeline_fd)
    keep_to_this_process(assignment.lock_fds)
    with collecting_no_garbage():
        function = pkgutil.resolve_name(assignment.function)
    answer = function(*assignment.arguments)
    with os.fdopen(assignment.answer_fd, "w", encoding="utf-8") as file:
        json.dump(escape_all(to_jsonable_python(answer)), file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait until libraries shut down


if __name__ == "__main__":
    main()
