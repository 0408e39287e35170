"""Show the report in a browser while the sweep runs: what has ended, fails, runs and remains."""

import argparse
import errno
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dpprof.cli.common import Parser, ending_in_a_sentence, path
from dpprof.planning.artifacts import RESULTS
from dpprof.report.live.server import Server, Watch
from dpprof.spec.validation import InputError
from dpprof.system.console import keep_log

PORT = 8642
_LAST_PORT = 65535


def port(text: str) -> int:
    """Read a port: 1 to 65535, or 0 for any that is free."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= _LAST_PORT):  # noqa: PLR2004 (digits)
        allowed = f"it must be from 1 to {_LAST_PORT}, or 0 for any that is free"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not allowed; {allowed}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser(prog="dpprof watch", description=__doc__)
    parser.add_argument(
        "--results",
        type=path,
        default=RESULTS,
        help="the folder results of the sweep; nothing is written to it (default: results)",
    )
    parser.add_argument(
        "--port",
        type=port,
        help=f"of 127.0.0.1, or 0 for any (default: {PORT}, or any if that is taken)",
    )
    arguments = parser.parse_args(argv)
    keep_log(None)
    with (
        ending_in_a_sentence("the page is no longer served; a sweep goes on"),
        closing(Watch(_root_of(arguments.results))) as watch,
        _open(watch, arguments.port) as server,
    ):
        print(f"{server.url} shows {arguments.results}; Ctrl-C ends it", flush=True)
        server.serve_forever()


def _root_of(results: Path) -> Path:
    """Return the folder that holds ``results``; links are not followed, as results may be one."""
    absolute = results.absolute()
    if absolute.name != RESULTS.name:
        raise InputError(
            f"--results: {results} is not allowed; it must be a folder named {RESULTS}"
        )
    return absolute.parent


def _open(watch: Watch, asked: int | None) -> Server:
    try:
        return Server(watch, PORT if asked is None else asked)
    except OSError as error:
        if asked is None and error.errno == errno.EADDRINUSE:
            return Server(watch, 0)
        is_taken = error.errno == errno.EADDRINUSE
        why = "is taken" if is_taken else f"cannot be used ({error.strerror})"
        otherwise = f"give another up to {_LAST_PORT}, or 0 for any that is free"
        raise InputError(f"--port: {PORT if asked is None else asked} {why}; {otherwise}") from None
