"""Say what a privacy budget costs with each method: noise, steps, GPU hours and money."""

from collections.abc import Sequence

from dpprof.ask.budget.ask import budget
from dpprof.ask.commands.capacities import ask, make_parser, print_answer, read_question
from dpprof.ask.commands.common import ending_in_a_sentence
from dpprof.ask.commands.options import add_privacy_options
from dpprof.experiments.config.privacy import Privacy

_EXAMPLE = " --samples 1e6 --tokens 2e9 --epsilon 8 --delta 1e-7"


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where no method safely fits."""
    parser = make_parser("budget", __doc__, _EXAMPLE)
    add_privacy_options(parser)
    arguments = parser.parse_args(argv)
    privacy = {name: getattr(arguments, name) for name in Privacy.model_fields}
    with ending_in_a_sentence():
        print_answer(ask(budget, read_question(arguments) | privacy), arguments)
