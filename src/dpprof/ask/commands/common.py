"""What all scripts share: the parser, path options, figures, and the error message at the end."""

import argparse
import contextlib
import difflib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dpprof.experiments.config.registry import EntryPointError
from dpprof.experiments.config.validation import (
    InputError,
    find_closest,
    one_of,
    spelling_options,
)
from dpprof.experiments.launch.device_lock import DeviceBusyError
from dpprof.experiments.records.record import ResultError
from dpprof.system.console import fail, keep_log, printable, say, shorten_lines
from dpprof.system.files import write_atomically

DRAWINGS = (".png", ".pdf", ".svg")  # the endings of files that figures are drawn to


class Parser(argparse.ArgumentParser):
    """A subcommand's parser whose error messages escape and cut the user's input."""

    def __init__(self, command: str, about: str | None, example: str = "") -> None:
        super().__init__(
            prog=f"dpprof {command}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"example: dpprof {command} {example}" if example else None,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse; refuse an unknown option by the option that is like it, without the usage."""
        arguments: argparse.Namespace
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
            hint = "".join(f"; did you mean {option!r}?" for option in near)
            hint = hint or find_closest("", name)
            why = shorten_lines(printable(f"{name!r} is not allowed{hint}"))
            usage = f"usage: {self.prog} --help lists the options"
            self.exit(2, f"{usage}\n{self.prog}: error: {why}\n")
        return arguments

    def error(self, message: str) -> NoReturn:
        """End the process with the usage and an error message."""
        super().error(shorten_lines(printable(message)))

    def parse_and_log(self, argv: Sequence[str] | None, what: str) -> argparse.Namespace:
        """Parse options, with ``--log`` for where ``what`` goes, and keep that log from now on."""
        self.add_argument("--log", type=path, help=f"where {what} goes (default: here)")
        arguments = self.parse_args(argv)
        keep_log(arguments.log)
        return arguments


def natural(text: str) -> int:
    """Read a number from 0 up."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):  # noqa: PLR2004 (digits)
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not allowed; it must be 0, 1, 2 ...")
    return int(text)


def positive(text: str) -> int:
    """Read a number from 1 up."""
    if not natural(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be 1, 2, 3 ...")
    return int(text)


def names_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Make a type of option: some of these names, comma-separated."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in allowed:
                why = f"{name!r} is not allowed; {one_of(allowed, name)}"
                raise argparse.ArgumentTypeError(why)
        return [name for name in allowed if name in names]

    return read


def path(text: str) -> Path:
    """Return a path; refuse an empty one, which would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not allowed; it must be a path")
    return Path(text)


def path_ending_in(endings: Sequence[str]) -> Callable[[str], Path]:
    """Make a type of option: a path whose ending says what the file is."""

    def read(text: str) -> Path:
        file = path(text)
        if file.suffix not in endings:
            allowed = f"its ending must be one of these; {one_of(endings)}"
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; {allowed}")
        return file

    return read


FILE: dict[str, Any] = {"type": path, "metavar": "FILE"}
DRAWING = FILE | {"type": path_ending_in(DRAWINGS)}
"""What options have in common that name a file, or one that a figure is drawn to."""


def save_figure(figure: Any, output: Path) -> None:
    """Write a drawn figure, in the format of the file's ending.

    Raises:
        OSError: The file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=output.suffix.removeprefix("."))
    write_atomically(output, drawn.getvalue())


@contextlib.contextmanager
def ending_in_a_sentence(what: str = "", *, status: int = 1) -> Iterator[None]:
    """End the script with one sentence where its input or a file causes an error.

    A closed standard output is none: ``main`` ends in silence then. ``what`` says what an
    interruption leaves unwritten, ``status`` is the exit status after an error. A device that
    stays busy ends it with status 75, of what may succeed later.
    """
    try:
        with spelling_options():
            yield
    except BrokenPipeError:
        raise
    except (InputError, ResultError, EntryPointError, OSError) as error:
        fail(error, status)
    except DeviceBusyError as error:
        fail(error, os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        if not what:
            raise
        say(f"interrupted; {what}")
        sys.exit(130)
