"""Prove that a method computes the reference's clipped gradient, and leave one JSON file.

The exit status is 0 whenever the JSON was written, whatever the verdict: it is in the file.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dpprof.cli.common import Parser, ending_in_a_sentence, path
from dpprof.cli.options import make_experiment
from dpprof.launch.verification_run import verify_apart
from dpprof.planning.code_digest import named_in_verdicts
from dpprof.planning.stand_ins import StandIn, read_stand_in
from dpprof.records.verdict import BUILT_IN, Verdict, verdict_path
from dpprof.spec import registry
from dpprof.spec.architecture import PREFIX
from dpprof.spec.validation import InputError, one_of, refuse
from dpprof.system.console import say

_OF_HUGGING_FACE = ("task", "lora", "trainable", "padding")


def format_verdict(verdict: Verdict) -> str:
    """Return the verdict in one line."""
    said = {True: "verified", False: "failed verification", None: "not verified"}[verdict.passed]
    error = verdict.max_relative_error
    how = "" if error is None else f", largest relative error {error:.1e}"
    why = f": {ascii(verdict.reason)[1:-1][:300]}" if verdict.reason else ""
    holes = f"; holes: {', '.join(verdict.holes)}" if verdict.holes else ""
    return f"{verdict.method} on {verdict.model}: {said}{how}{why}{holes}"


def _read_model(arguments: argparse.Namespace) -> str | StandIn:
    """Return the model to verify on: a name, or the stand-in of a Hugging Face model."""
    options = {name: getattr(arguments, name) for name in _OF_HUGGING_FACE}
    given = {name: value for name, value in options.items() if value is not None}
    model = arguments.model
    if model is not None and model.lstrip().startswith((PREFIX, "{")):
        sizes = {"batch_size": "1", "seq_len": "1", "device": "cpu"}
        stated = {"model": model, "method": arguments.method, **sizes, **given}
        return StandIn.of(make_experiment(stated)) or BUILT_IN
    if given:
        options_given = ", ".join(f"--{name}" for name in given)
        raise InputError(f"{options_given}: only for {PREFIX}NAME, a Hugging Face model")
    if model is None:
        return read_stand_in(arguments.stand_in)
    models = [BUILT_IN, *registry.names("models")]
    if model not in models:
        raise refuse("--model", model, f"{one_of(models, model)}, or {PREFIX}NAME")
    return BUILT_IN if model == BUILT_IN else named_in_verdicts(model)


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
    for name in _OF_HUGGING_FACE:
        parser.add_argument(f"--{name}", metavar="VALUE", help="as of an experiment")
    parser.add_argument("--method", required=True, help="a method's name")
    parser.add_argument(
        "--output",
        type=path,
        metavar="FILE",
        help="the verdict's file to write (default: results/verify/MODEL-METHOD.json)",
    )
    arguments = parser.parse_and_log(argv, "what else is printed")
    with ending_in_a_sentence("no verdict was written"):
        model = _read_model(arguments)
        registry.check("methods", arguments.method, "--method")
        label = model if isinstance(model, str) else model.label
        output = arguments.output or verdict_path(Path(), label, arguments.method)
        verdict = verify_apart(model, arguments.method, output)
    say(format_verdict(verdict))
