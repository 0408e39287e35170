"""Predict the memory, FLOPs and least time of one experiment, without running it."""

import sys
from collections.abc import Sequence

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.ask.commands.options import add_experiment_options, read_given
from dpprof.ask.estimate.ask import estimate
from dpprof.ask.predictions import PredictionError
from dpprof.system.console import printable


def make_parser() -> Parser:
    """Make the options: one for every field of an experiment."""
    parser = Parser(
        "estimate",
        __doc__,
        example="--model 1b --method flash-bk --batch-size 4 --seq-len 2048 --dtype bfloat16 "
        "--target h100",
    )
    parser.add_argument(
        "--output",
        type=path,
        metavar="FILE",
        help="the result file to write (default: results/estimate/ID.r0.json)",
    )
    add_experiment_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where nothing could be predicted."""
    arguments = make_parser().parse_args(argv)
    options = {"model": None, "method": None} | read_given(arguments)
    with ending_in_a_sentence("no result was written"):
        try:
            predicted = estimate(**options, output=arguments.output)
        except PredictionError:  # it has been told
            sys.exit(1)
    print(printable(str(predicted)))
