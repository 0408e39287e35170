"""Runs a verification in a separate process, and always writes one file."""

import platform
import time
from functools import partial
from pathlib import Path

from dpprof.launch.isolated import UnansweredError, ask_child
from dpprof.launch.device_lock import hold_one, who_holds
from dpprof.planning.code_digest import verdict_digest
from dpprof.planning.code_in_use import CodeInUse
from dpprof.records.provenance import describe_git, package_versions
from dpprof.records.verdict import (
    SCHEMA_VERSION,
    TOLERANCE,
    Findings,
    Verdict,
    judge,
    judged,
    name_holes,
    write_verdict,
)
from dpprof.system.console import say
from dpprof.system.files import check_writable

TIMEOUT_S = 300
"""A verification takes seconds; one that takes longer than this counts as hung."""

_VERIFY = "dpprof.verification.verify"


def verify_apart(model: str, method: str, output: Path) -> Verdict:
    """Verify a method on a model and write one complete JSON.

    A verification may run at the same time as predictions, but waits for measurements to end.

    Args:
        model: A model's name, or ``built-in``.
        method: A method's name.
        output: The verdict's file; written as a whole at the end.

    Raises:
        OSError: The verdict cannot be written; this is checked before the verification.
    """
    check_writable(output)
    code = CodeInUse(partial(verdict_digest, model, method), __file__)

    def waiting() -> None:
        say(f"a measurement is running on this machine; waiting for {who_holds(['cpu'])}")

    with hold_one(["cpu"], waiting, shared=True) as (_, lock_fd):
        code.start()
        start = time.monotonic()
        (mechanism, cases), ended = _ask_child(model, method, lock_fd)
        wall_s = time.monotonic() - start
        digest = code.settle()
    passed, reason = judge(cases)
    return write_verdict(
        output,
        {
            "model": model,
            "method": method,
            "mechanism": mechanism,
            "passed": passed,
            "reason": ended or reason,
            "schema_version": SCHEMA_VERSION,
            "tolerance": TOLERANCE,
            "holes": name_holes(cases),
            "max_relative_error": _largest([one.max_relative_error for one in judged(cases)]),
            "max_relative_error_of_norms": _largest(
                [one.max_relative_error_of_norms for one in judged(cases)]
            ),
            "references": sorted({name for one in cases for name in one.references}),
            "cases": cases,
            "code_digest": digest,
            "wall_s": wall_s,
            "provenance": {
                "git": describe_git(),
                "python": platform.python_version(),
                "packages": package_versions(),
            },
        },
    )


def _largest(errors: list[float | None]) -> float | None:
    return max((error for error in errors if error is not None), default=None)


def _ask_child(model: str, method: str, lock_fd: int) -> tuple[Findings, str | None]:
    """Return the findings of a child, or how the child ended without an answer."""
    try:
        found: Findings = ask_child(
            "verification",
            _VERIFY,
            "verify",
            model,
            method,
            timeout_s=TIMEOUT_S,
            lock_fd=lock_fd,
        )
    except UnansweredError as error:
        return Findings(None, []), str(error)
    return found, None
