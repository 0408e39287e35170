"""Audit a private training of your own: a lower bound on its epsilon, beside its accountant's.

The exit status is 1 if the training is not as private as its accountant says.
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, positive
from dpprof.experiments.config import registry
from dpprof.experiments.config.naming import is_code
from dpprof.experiments.config.validation import refuse
from dpprof.system.console import say

_PARTS = 4
"""What the function returns."""


_LEAST = 100
"""The least canaries that show anything."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("audit", __doc__, example="mine.training:audited --delta 1e-5 --canaries 5000")
    parser.add_argument(
        "training",
        metavar="MODULE:FUNCTION",
        help="a function that returns what dpprof.private.audit takes: a model, the losses of its "
        "samples, data, and the function that trains",
    )
    parser.add_argument("--delta", type=_share, required=True, help="of the guarantee")
    parser.add_argument(
        "--canaries", type=positive, default=1000, help="how many, at least 100 (default: 1000)"
    )
    parser.add_argument(
        "--confidence", type=_share, default=0.95, help="of the bound (default: 0.95)"
    )
    arguments = parser.parse_and_log(argv, "what else is printed")
    with ending_in_a_sentence():
        if arguments.canaries < _LEAST:
            raise refuse("--canaries", arguments.canaries, f"it must be at least {_LEAST}")
        if not is_code(arguments.training):
            raise refuse("training", arguments.training, "name a function, as package.module:name")
        registry.check("models", arguments.training, "training")
        make = registry.load("models", arguments.training)
        takes_nothing = all(
            p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(make).parameters.values()
        )
        parts = make() if takes_nothing else None
        if not isinstance(parts, tuple) or len(parts) != _PARTS:
            raise refuse(
                "training",
                arguments.training,
                "it must take nothing, and return a model, the losses of its samples, data, and "
                "the function that trains",
            )
    audited = importlib.import_module("dpprof.private").audit(
        *parts,
        delta=arguments.delta,
        canaries=arguments.canaries,
        confidence=arguments.confidence,
    )
    say(str(audited))
    if audited.exceeds:
        sys.exit(1)


def _share(text: str) -> float:
    """Read a number between 0 and 1."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not allowed; it must be above 0, below 1"
        )
    return share
