"""Say which models can be trained privately on a GPU: whole, with LoRA, and with QLoRA.

Each row tells the largest batch that safely fits, tokens per second, and the hours and the price of
some tokens, or how much memory one sample needs. Each has a command that answers it alone.
"""

from collections.abc import Sequence

from dpprof.ask.commands.capacities import add_output_options, ask, print_answer
from dpprof.ask.commands.common import Parser, ending_in_a_sentence, positive
from dpprof.ask.fits.ask import MODELS, SEQ_LENS, WAYS, fits
from dpprof.system.files import check_writable


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where nothing fits."""
    parser = Parser("fits", __doc__, example="--target rtx-4090 --price-per-hour 0.4")
    parser.add_argument("--target", nargs="+", required=True, metavar="GPU", help="targets' names")
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        metavar="MODEL",
        help=f"models' names (default: {' '.join(MODELS)})",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        metavar="WAY",
        help=f"how they are trained (default: {' '.join(WAYS)})",
    )
    parser.add_argument(
        "--seq-lens",
        nargs="+",
        type=positive,
        default=list(SEQ_LENS),
        metavar="N",
        help=f"tokens in a sample (default: {' '.join(map(str, SEQ_LENS))})",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        default=10e6,
        metavar="N",
        help="how many tokens the hours and the price are for (default: 10 million)",
    )
    parser.add_argument(
        "--price-per-hour", type=float, metavar="PRICE", help="price of a GPU for an hour"
    )
    add_output_options(parser)
    arguments = parser.parse_args(argv)
    with ending_in_a_sentence():
        if arguments.json is not None:
            check_writable(arguments.json)
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        print_answer(ask(fits, options), arguments)
