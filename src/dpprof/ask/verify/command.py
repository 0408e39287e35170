"""Prove that a method computes the reference's clipped gradient, and leave one JSON file.

The exit status is 0 whenever the JSON was written, whatever the verdict: it is in the file.
"""

from collections.abc import Sequence

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.ask.verify.ask import OF_HUGGING_FACE, verify
from dpprof.experiments.config.architecture import PREFIX
from dpprof.experiments.records.verdict import BUILT_IN
from dpprof.system.console import say


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser(
        "verify",
        __doc__,
        example="--model hf:llama-3.2-1b --lora rank=16 --padding 0.3 --method flash-bk",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--model",
        help=f"a model's name; {BUILT_IN}, which stands for every size of dpprof's own "
        f"transformer; or {PREFIX}NAME, for which a small model with the same layers is verified",
    )
    which.add_argument(
        "--stand-in",
        type=path,
        metavar="FILE",
        help="the file of such a small model, as planning writes it",
    )
    for name in OF_HUGGING_FACE:
        parser.add_argument(f"--{name}", metavar="VALUE", help="as of an experiment")
    parser.add_argument("--method", required=True, help="a method's name")
    parser.add_argument(
        "--output",
        type=path,
        metavar="FILE",
        help="the verdict's file to write (default: results/verify/MODEL-METHOD.json)",
    )
    arguments = parser.parse_and_log(argv, "what else is printed")
    names = ("model", "method", "stand_in", "output", *OF_HUGGING_FACE)
    with ending_in_a_sentence("no verdict was written"):
        verified = verify(**{name: getattr(arguments, name) for name in names})
    say(str(verified))
