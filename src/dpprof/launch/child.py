"""The child process of a measurement: calls one function and writes its answer.

``isolated.py`` starts it as ``python -m dpprof.launch.child ASSIGNMENT``.
"""

import faulthandler
import json
import os
import pkgutil
import sys
from typing import NoReturn

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dpprof.launch.device_lock import keep_to_this_process
from dpprof.system.imports import collecting_no_garbage
from dpprof.system.messages import escape_all
from dpprof.system.process_groups import die_with, end_group_with


class Assignment(BaseModel, frozen=True, extra="forbid"):
    """What a child has to do, its only command-line argument."""

    function: str
    """The function to call, as ``module:name``; only the child imports it."""

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
