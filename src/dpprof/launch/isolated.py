"""Calls a function in a child process, which may crash, exit or hang.

The child is forked before torch is imported, so it costs no more than a call in this process.
Neither the child nor the processes that it starts outlive the answer.
"""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

from dpprof.launch.device_lock import keep_to_this_process
from dpprof.system.child_output import Output, Sink
from dpprof.system.process_groups import die_with, end_group, end_group_with, no_survivors

_POLL_S = 0.5


class UnansweredError(Exception):
    """A child ended without an answer; the message says how."""


def ask_child(
    what: str,
    module: str,
    function: str,
    *arguments: Any,
    timeout_s: int,
    lock_fd: int,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Return the result of a function called in a child process.

    Args:
        what: What the child does, as a noun for messages.
        module: The function's module; only the child imports it.
        function: The function's name.
        arguments: The function's arguments.
        timeout_s: Whole seconds after which the child counts as hung.
        lock_fd: The lock that the child holds and that its own children must not inherit.
        environment: Variables that the child sets before it imports anything.

    Raises:
        UnansweredError: The child ended without an answer.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    lifeline, held = os.pipe()
    printed, output = os.pipe()
    child = context.Process(
        target=_answer,
        args=(sender, module, function, arguments),
        kwargs={
            "asker_pid": os.getpid(),
            "timeout_s": timeout_s,
            "lock_fd": lock_fd,
            "lifeline": lifeline,
            "held": held,
            "output": output,
            "environment": environment or {},
        },
        daemon=True,
    )
    child.start()
    assert child.pid is not None
    sender.close()
    for descriptor in (lifeline, output):
        os.close(descriptor)
    said = Output(os.fdopen(printed, "rb"), Sink(None))
    try:
        with no_survivors():
            try:
                return _receive(receiver, child)
            except EOFError:
                child.join()
                raise UnansweredError(_explain_end(what, child.exitcode or 0, timeout_s)) from None
            finally:
                # The child has answered; do not wait until its libraries shut down.
                child.kill()  # in case it does not lead its group yet
                end_group(child.pid)
                child.join()
    finally:
        os.close(held)
        said.finish()


def _receive(receiver: Connection, child: ForkProcess) -> Any:
    """Return the child's answer; poll the child too, as its children may hold the pipe open.

    Raises:
        EOFError: The child ended without an answer.
    """
    while not receiver.poll(_POLL_S):
        if not child.is_alive() and not receiver.poll():
            raise EOFError
    return receiver.recv()


def _answer(
    sender: Connection,
    module: str,
    function: str,
    arguments: tuple[Any, ...],
    *,
    asker_pid: int,
    timeout_s: int,
    lock_fd: int,
    lifeline: int,
    held: int,
    output: int,
    environment: Mapping[str, str],
) -> None:
    """Run in the child: call the function and send the answer; the kernel enforces the timeout."""
    os.setsid()
    die_with(asker_pid)
    os.close(held)
    end_group_with(lifeline)
    keep_to_this_process(lock_fd)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(timeout_s)
    os.environ.update(environment)
    # Looked up by name, because the parent must not import torch before the fork.
    sender.send(getattr(importlib.import_module(module), function)(*arguments))


def _explain_end(what: str, exit_code: int, timeout_s: int) -> str:
    if exit_code == -signal.SIGALRM:
        return f"the {what} took longer than {timeout_s} s"
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"the {what}'s process ended with {how} before it could answer"
