"""Lines for the person at the terminal, and a log of whatever else is printed.

Neither can fail what is being done: the terminal may be closed, the log's disk full.
"""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

_WIDEST = 1000
"""Letters of a line."""


class _Unfailing(io.FileIO):
    """A descriptor that takes everything; what it cannot write is lost."""

    def write(self, data: Any) -> int:
        """Write bytes, or lose them."""
        with suppress(OSError):
            super().write(data)
        return len(data)


class _Terminal:
    """Where lines go beside standard error, while that is a log."""

    stream: TextIO | None = None


def printable(text: str) -> str:
    """Escape what could disturb a terminal: control characters but line breaks, and the like."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def shorten_lines(text: str) -> str:
    """Cut lines that nobody would read to their end."""
    cut = (
        line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..." for line in text.split("\n")
    )
    return "\n".join(cut)


def say(text: str) -> None:
    """Print a line to standard error; a terminal that is gone fails nothing, now or at exit."""
    _tell("dpprof: " + text.replace("\n", "\\n"))


def fail(problem: object) -> NoReturn:
    """End the process with a sentence and the exit status 1."""
    _tell(f"error: {problem}")
    sys.exit(1)


def keep_log(path: Path | None) -> None:
    """Send what this process and its children print to a file; lines reach the terminal too.

    Args:
        path: The log, which begins anew; None for none. Either way, no file that is opened
            later takes the place of a stream that was closed.
    """
    _occupy_standard_descriptors()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without waiting, in case it is a pipe that nobody reads.
        kind = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
        log = os.open(path, kind, 0o644)
    except OSError as error:
        say(f"no log is kept: {error}")
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
                print(shorten_lines(printable(line)), file=stream, flush=True)
            except OSError:
                sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the end)


def _occupy_standard_descriptors() -> None:
    """Fill the places of streams that were closed: the next file opened would be one of them."""
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
