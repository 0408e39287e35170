"""A question to a child process, which may crash, exit or hang over it.

The child is forked before torch is imported, so it costs no more than doing the work here
would, and it keeps nobody waiting.
"""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any


class UnansweredError(Exception):
    """A child that ended without an answer; the message says how."""


def ask_child(
    what: str,
    module: str,
    function: str,
    *arguments: Any,
    timeout_s: int,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Have a child call a function, and return what that returns.

    Args:
        what: What the child does, as a noun for messages.
        module: Where the function is; imported by the child alone.
        function: Its name.
        arguments: Handed to it.
        timeout_s: Whole seconds after which the child is taken to hang.
        environment: Variables that the child sets before it imports anything.

    Raises:
        UnansweredError: The child ended before it could tell.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=_answer,
        args=(sender, module, function, arguments),
        kwargs={"timeout_s": timeout_s, "environment": environment or {}},
        daemon=True,
    )
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise UnansweredError(_explain_end(what, child.exitcode or 0, timeout_s)) from None
    child.kill()  # it has told all that it had to; nobody waits for libraries to wind up
    child.join()
    return answer


def _answer(
    sender: Connection,
    module: str,
    function: str,
    arguments: tuple[Any, ...],
    *,
    timeout_s: int,
    environment: Mapping[str, str],
) -> None:
    """Be the child; the kernel ends it when its time is over, whoever still waits for it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(timeout_s)
    os.environ.update(environment)
    # Looked up by name: nothing that asks may import torch before the fork.
    sender.send(getattr(importlib.import_module(module), function)(*arguments))


def _explain_end(what: str, exit_code: int, timeout_s: int) -> str:
    if exit_code == -signal.SIGALRM:
        return f"the {what} took longer than {timeout_s} s"
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"the {what}'s process ended with {how} before it could tell"
