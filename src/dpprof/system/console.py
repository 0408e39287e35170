"""Lines for the user's terminal, and a log of all other output.

Neither makes a command fail, even if the terminal is closed or the log's disk is full.
"""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

_WIDEST = 1000
"""The most letters of a line."""


class _Unfailing(io.FileIO):
    """A file that accepts all writes; it drops what it cannot write."""

    def write(self, data: Any) -> int:
        """Write bytes, or drop them."""
        with suppress(OSError):
            super().write(data)
        return len(data)


class _Terminal:
    """The second destination of lines, while standard error is a log."""

    stream: TextIO | None = None


def printable(text: str) -> str:
    """Return a text without what could disturb a terminal: control characters, except newlines."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def shorten_lines(text: str) -> str:
    """Return a text with its overlong lines cut."""
    cut = (
        line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..." for line in text.split("\n")
    )
    return "\n".join(cut)


def say(text: str) -> None:
    """Print a line to standard error; a closed terminal causes no error, now or at exit."""
    _tell("dpprof: " + text.replace("\n", "\\n"))


def fail(problem: object, status: int = 1) -> NoReturn:
    """Print an error and end the process with an exit status."""
    _tell(f"error: {problem}")
    sys.exit(status)


def keep_log(path: Path | None) -> None:
    """Write the output of this process and its children to a log; lines go to the terminal too.

    With and without a log, no file opened later takes the descriptor of a closed standard stream.
    """
    _occupy_standard_descriptors()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Non-blocking, in case the path is a pipe without a reader.
        kind = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
        log = os.open(path, kind, 0o644)
    except OSError as error:
        say(f"no log is written: {error}")
        return
    _Terminal.stream = _open(os.dup(2))
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.stdout = sys.stderr = _open(2)


def _tell(line: str) -> None:
    for stream in (_Terminal.stream, sys.stderr):
        if stream is not None:
            try:
                # In one piece, because threads tell lines at the same time.
                print(f"{shorten_lines(printable(line))}\n", end="", file=stream, flush=True)
            except OSError:
                sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the end)


def _occupy_standard_descriptors() -> None:
    """Reopen closed standard streams, because the next opened file would take their descriptors."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:  # noqa: PLR2004 (input, output, errors)
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _open(descriptor: int) -> TextIO:
    return io.TextIOWrapper(
        _Unfailing(descriptor, "w", closefd=False),
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
