"""Say how large a batch fits on a GPU that need not be here, and which private method to use.

--model takes one value; --dtype, --seq-len and --image-size take one or more. For several values,
the answer is a table of the fastest method for each combination. --checkpointing best tries every
way of checkpointing; dpprof then judges each method by its fastest checkpointing that fits.
--head best tries every way to the loss, and says what the fastest brings.
"""

import argparse
from collections.abc import Sequence

from dpprof.ask.advise.ask import Advised, advise, refuse_short_figure
from dpprof.ask.answer import load_figure
from dpprof.ask.capacities import LISTS
from dpprof.ask.commands.capacities import ask, make_parser, print_answer, read_question
from dpprof.ask.commands.common import DRAWINGS, ending_in_a_sentence, path_ending_in, save_figure
from dpprof.experiments.config.validation import refuse, spell
from dpprof.results.analysis.advice.advice import BEST
from dpprof.system.files import check_writable


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse options, and refuse what only this command refuses.

    Raises:
        InputError: An option's value is not allowed.
    """
    notes = {
        "checkpointing": f"{BEST}: try each way, and judge each method by its fastest that fits",
        "head": f"{BEST}: try each, and say what it brings",
    }
    parser = make_parser("advise", __doc__, several=("model", *LISTS), notes=notes)
    parser.add_argument(
        "--figure",
        type=path_ending_in(DRAWINGS),
        metavar="FILE",
        help="also draw tokens per second over several sequence lengths, or numbers of ranks: a "
        ".png, .pdf or .svg",
    )
    parser.add_argument("--batch-size", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.batch_size is not None:
        why = "advise finds the largest batch that fits; leave it out"
        raise refuse("--batch-size", " ".join(arguments.batch_size), why)
    if arguments.model is not None:
        models = arguments.model
        if len(models) > 1:
            raise refuse("--model", " ".join(models), "give one model, and call once for each")
        [arguments.model] = models
    if arguments.figure is not None:
        if all(len(values or ()) < 2 for values in (arguments.seq_len, arguments.world_sizes)):  # noqa: PLR2004 (a line has two ends)
            raise refuse_short_figure(spell("figure"), str(arguments.figure))
        load_figure("advice", spell("figure"))
        check_writable(arguments.figure)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where no method safely fits."""
    with ending_in_a_sentence():
        arguments = read_options(argv)
        advised = ask(advise, read_question(arguments))
        if arguments.figure is not None:
            assert isinstance(advised, Advised)
            save_figure(advised.plot(), arguments.figure)
        print_answer(advised, arguments)
