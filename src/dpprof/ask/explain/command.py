"""Explain why one run needs more memory than another: by component, layer and operator.

A and B are any two result files of the instruments memory, estimate or capacity: other methods,
batch sizes, models, targets; recorded or predicted. The bars lead from B's peak to A's, and sum
to the difference of the two with 0 bytes left.
"""

from collections.abc import Sequence

from dpprof.ask.answer import load_figure
from dpprof.ask.commands.common import (
    DRAWINGS,
    Parser,
    ending_in_a_sentence,
    path,
    path_ending_in,
    positive,
    save_figure,
)
from dpprof.ask.explain.ask import explain
from dpprof.experiments.config.validation import spell
from dpprof.results.analysis.difference.waterfall import LEVELS
from dpprof.system.console import printable
from dpprof.system.files import check_writable

FORMATS = ("text", "json")


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser(
        "explain",
        __doc__,
        example="results/memory/A.r0.json results/memory/B.r0.json --depth operator --top 3",
    )
    parser.add_argument("a", type=path, metavar="A.json", help="the result to explain")
    parser.add_argument("b", type=path, metavar="B.json", help="the result to compare it with")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="what is printed; json has every level and the timelines (default: text)",
    )
    parser.add_argument(
        "--depth",
        choices=list(LEVELS),
        default="layer",
        help="the innermost level that is printed (default: layer)",
    )
    parser.add_argument(
        "--top",
        type=positive,
        default=5,
        metavar="N",
        help="print this many layers of a component, and operators of a layer, one by one, and "
        "the others together (default: 5)",
    )
    parser.add_argument(
        "--every-layer",
        action="store_true",
        help="print the same layer of every block one by one, not together",
    )
    parser.add_argument(
        "--output",
        type=path_ending_in(DRAWINGS),
        metavar="FILE",
        help="also draw the waterfall and both timelines: a .png, .pdf or .svg",
    )
    arguments = parser.parse_args(argv)
    with ending_in_a_sentence():
        if arguments.output is not None:
            load_figure("waterfall", spell("output"))
            check_writable(arguments.output)
        explained = explain(arguments.a, arguments.b)
        if arguments.output is not None:
            save_figure(explained.plot(), arguments.output)
    if arguments.format == "json":
        print(printable(explained.to_json()))
    else:
        every_layer = arguments.every_layer
        print(printable(explained.text(arguments.depth, arguments.top, every_layer=every_layer)))
