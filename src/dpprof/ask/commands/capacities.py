"""Options and output of ``advise``, ``budget`` and ``fits``."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dpprof.ask.answer import BatchAnswer
from dpprof.ask.commands.common import FILE, Parser, positive
from dpprof.ask.commands.options import add_experiment_options, read_given
from dpprof.ask.defaults import DESCRIBED
from dpprof.system.console import printable
from dpprof.system.files import check_writable, write_atomically


def make_parser(command: str, about: str | None, example: str = "", **of_fields: Any) -> Parser:
    """Make the options of a subcommand that finds capacities.

    ``example`` adds to its example; ``of_fields`` are ``several`` and ``notes`` of
    ``add_experiment_options``.
    """
    parser = Parser(
        command,
        about,
        example=f"--model 1b --target h200 --seq-len 1024{example}. --memory-limit-bytes replaces "
        "the target's memory.",
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="the methods (default: all)")
    parser.add_argument(
        "--world-sizes",
        nargs="+",
        type=positive,
        metavar="N",
        help="the numbers of ranks to compare; 1 means one process without DDP or FSDP2. "
        "--parallel gives the kind of parallel training, without world_size (default: kind=fsdp)",
    )
    add_output_options(parser)
    leave_out = ("method", "batch_size")
    add_experiment_options(parser, leave_out=leave_out, defaults=DESCRIBED, **of_fields)
    return parser


def add_output_options(parser: Parser) -> None:
    """Add the options on what is said of an answer, where it goes, and on those that are kept."""
    parser.add_argument(
        "--details",
        action="store_true",
        help="also print every column, why methods are missing, and what each number rests on",
    )
    parser.add_argument("--json", **FILE, help="write the results as JSON to this file")
    parser.add_argument("--csv", **FILE, help="write the table as CSV to this file")
    parser.add_argument(
        "--again", action="store_true", help="ignore what is kept, in results and the package"
    )


def read_question(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of ``advise`` or ``budget`` that were given as options.

    Raises:
        OSError: A file cannot be written.
    """
    check_outputs(arguments)
    others = {name: getattr(arguments, name) for name in ("methods", "world_sizes", "again")}
    return {"model": None} | read_given(arguments) | others


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise ``OSError`` where a file of an answer cannot be written."""
    for output in (arguments.json, arguments.csv):
        if output is not None:
            check_writable(output)


def ask(question: Callable[..., BatchAnswer], options: Mapping[str, Any]) -> BatchAnswer:
    """Ask a question; an interruption ends this process and its workers at once."""
    try:
        return question(**options)
    except KeyboardInterrupt:
        os._exit(130)


def print_answer(answer: BatchAnswer, arguments: argparse.Namespace) -> NoReturn:
    """Print an answer, write its files, and exit with status 1 where no batch safely fits.

    Raises:
        OSError: A file cannot be written.
    """
    if arguments.json is not None:
        write_atomically(arguments.json, answer.to_json() + "\n")
    if arguments.csv is not None:
        write_atomically(arguments.csv, answer.table().to_csv(index=False))
    print(printable(f"{answer}\n\n{answer.details}" if arguments.details else str(answer)))
    sys.exit(0 if answer.fits else 1)
