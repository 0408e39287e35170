"""Explain why one run needs more memory than another: by component, layer and operator.

A and B are any two result files of the instruments memory, estimate or capacity: other methods,
batch sizes, models, targets; recorded or predicted. The bars lead from B's peak to A's, and sum
to the difference of the two with 0 bytes left.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dpprof.analysis.difference.difference import Difference, explain_difference
from dpprof.analysis.difference.waterfall import LEVELS, list_holdings
from dpprof.cli.common import (
    DRAWINGS,
    Parser,
    ending_in_a_sentence,
    load_figure,
    path,
    path_ending_in,
    positive,
    save_figure,
)
from dpprof.records.record import ResultError
from dpprof.records.result import Result, read_result
from dpprof.report.terminal.difference import Detail, render_text, say
from dpprof.spec.number_formats import KEPT_LOGITS
from dpprof.spec.validation import InputError
from dpprof.system.console import printable
from dpprof.system.files import check_writable

FORMATS: dict[str, Callable[[Difference, Detail], str]] = {
    "text": render_text,
    "json": lambda difference, _: json.dumps(difference.as_json(), indent=1),
}


def read(file: Path) -> Result:
    """Read a result, and check that it records what was live at the peak.

    Raises:
        InputError: It is no such result; the message names the file.
        OSError: The file cannot be read.
    """
    try:
        result = read_result(file)
        list_holdings(result)
    except ResultError as error:  # its own message says to delete the file, whatever it is
        raise InputError(f"{file}: {error.problem}") from None
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return result


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
        choices=list(FORMATS),
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
            check_writable(arguments.output)
        a, b = arguments.a, arguments.b
        if a.exists() and b.exists() and a.samefile(b):
            raise InputError(f"{b}: A and B are the same file; name two results")
        results = read(a), read(b)
        difference = explain_difference(*results)
        if arguments.output is not None:
            draw = load_figure("waterfall", "--output")
            save_figure(draw(difference, say(difference)), arguments.output)
    detail = Detail(arguments.depth, arguments.top, arguments.every_layer)
    print(printable(FORMATS[arguments.format](difference, detail)))
    if arguments.format == "text":
        for side, result in zip((difference.a, difference.b), results, strict=True):
            if result.experiment.keep_logits:
                print(printable(f"{side.name}: {KEPT_LOGITS}."))
