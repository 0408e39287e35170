"""What every script has in common: its parser, its paths, and how it ends when it cannot go on."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from dpprof.records.record import ResultError
from dpprof.spec.registry import EntryPointError
from dpprof.spec.validation import InputError
from dpprof.system.console import fail, printable, shorten_lines


class Parser(argparse.ArgumentParser):
    """A parser whose complaints escape and cut what was given; argparse repeats it as it is."""

    def error(self, message: str) -> NoReturn:
        """End with the usage and a complaint."""
        super().error(shorten_lines(printable(message)))


def path(text: str) -> Path:
    """Read a path; the empty one would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not allowed; it must be a path")
    return Path(text)


def add_log_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--log``."""
    parser.add_argument("--log", type=path, help=f"where {what} goes (default: here)")


@contextlib.contextmanager
def ending_in_a_sentence() -> Iterator[None]:
    """End the script with one sentence where what it was given, or a file, is the problem."""
    try:
        yield
    except (InputError, ResultError, EntryPointError, OSError) as error:
        fail(error)
