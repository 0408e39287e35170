"""Prove that a method computes the reference's clipped gradient, and leave one JSON file.

The exit status is 0 whenever the JSON was written, whatever the verdict: it is in the file.
"""

from collections.abc import Sequence

from dpprof.cli.common import Parser, add_log_option, ending_in_a_sentence, path
from dpprof.launch.verification_run import verify_apart
from dpprof.planning.code_digest import verified_as
from dpprof.records.verdict import BUILT_IN, Verdict
from dpprof.spec import registry
from dpprof.spec.validation import one_of, refuse
from dpprof.system.console import keep_log, say


def tell(verdict: Verdict) -> str:
    """Say the verdict in one line."""
    said = {True: "verified", False: "failed verification", None: "not verified"}[verdict.passed]
    error = verdict.max_relative_error
    how = "" if error is None else f", largest relative error {error:.1e}"
    why = f": {ascii(verdict.reason)[1:-1][:300]}" if verdict.reason else ""
    holes = f"; holes: {', '.join(verdict.holes)}" if verdict.holes else ""
    return f"{verdict.method} on {verdict.model}: {said}{how}{why}{holes}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser(prog="dpprof verify", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model",
        required=True,
        help=f"a model's name; {BUILT_IN} stands for every size of dpprof's own transformer",
    )
    parser.add_argument("--method", required=True, help="a method's name")
    parser.add_argument("--output", type=path, required=True, help="the verdict's file to write")
    add_log_option(parser, "what else is printed")
    arguments = parser.parse_args(argv)
    keep_log(arguments.log)
    with ending_in_a_sentence("no verdict was written"):
        model, models = arguments.model, [BUILT_IN, *registry.names("models")]
        if model not in models:
            raise refuse("--model", model, one_of(models, model))
        registry.check("methods", arguments.method, "--method")
        verdict = verify_apart(
            model if model == BUILT_IN else verified_as(model), arguments.method, arguments.output
        )
    say(tell(verdict))
