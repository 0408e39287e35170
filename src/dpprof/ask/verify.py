"""Prove that a method computes the reference's clipped gradient, and leave one JSON file.

The exit status is 0 whenever the JSON was written, whatever the verdict: it is in the file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from dpprof.ask.answer import Answer, DataFrame, tabulate
from dpprof.ask.commands.common import FILE, Parser, ending_in_a_sentence
from dpprof.ask.questions import make_experiment, naming
from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import PREFIX
from dpprof.experiments.config.naming import is_code
from dpprof.experiments.config.validation import InputError, one_of, refuse, spell
from dpprof.experiments.launch.verification_run import verify_apart
from dpprof.experiments.planning.code_digest import named_in_verdicts
from dpprof.experiments.planning.stand_ins import StandIn, read_stand_in
from dpprof.experiments.records.verdict import BUILT_IN, Verdict, verdict_path
from dpprof.system.console import say

OF_HUGGING_FACE = ("task", "lora", "trainable", "padding")


class Verified(Answer):
    """A verdict; ``verdict`` has every case (docs/numbers/verified.md)."""

    _short: ClassVar = (
        *("scenario", "attention", "batch_size", "outcome", "max_relative_error", "reason"),
    )

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        verdict = self.verdict
        passed = {True: "verified", False: "failed verification", None: "not verified"}
        error = verdict.max_relative_error
        how = "" if error is None else f", largest relative error {error:.1e}"
        why = f": {ascii(verdict.reason)[1:-1][:300]}" if verdict.reason else ""
        holes = f"; holes: {', '.join(verdict.holes)}" if verdict.holes else ""
        return f"{verdict.method} on {verdict.model}: {passed[verdict.passed]}{how}{why}{holes}"

    def __str__(self) -> str:
        return self.sentence

    def table(self) -> DataFrame:
        """Return a row for each case that was tried."""
        return tabulate(case.model_dump() for case in self.verdict.cases)

    def to_json(self) -> str:
        """Return the verdict, as its file has it."""
        return self.verdict.model_dump_json(indent=1)


def verify(
    model: str | None = None,
    *,
    method: str,
    stand_in: str | Path | None = None,
    output: str | Path | None = None,
    **of_hugging_face: Any,
) -> Verified:
    """Prove that a method computes the reference's clipped gradient, in a process of its own.

    Args:
        model: A model's name, ``built-in``, ``hf:NAME``, or ``package.module:function``.
        method: The method's name.
        stand_in: In place of ``model``, the file of a stand-in, as planning writes it.
        output: The verdict's file; ``results/verify/MODEL-METHOD.json`` where it is not given.
        **of_hugging_face: ``task``, ``lora``, ``trainable`` and ``padding``, as of an experiment.

    Raises:
        InputError: A value is not allowed, or a required one is missing.

    Example:
        >>> import dpprof
        >>> dpprof.verify("built-in", method="flash-bk").verdict.passed
        True
    """
    with naming({"model": model, **of_hugging_face}) as fields:
        subject = _find_subject(fields, stand_in, method)
        registry.check("methods", method, spell("method"))
        label = subject if isinstance(subject, str) else subject.label
        file = Path(output or verdict_path(Path(), label, method))
        return Verified(verify_apart(subject, method, file))


def _find_subject(
    fields: dict[str, Any], stand_in: str | Path | None, method: str
) -> str | StandIn:
    """Return the model to verify on: a name, or the stand-in of a Hugging Face model."""
    if unknown := fields.keys() - {"model", *OF_HUGGING_FACE}:
        raise InputError(f"unknown key {min(unknown)!r}; {one_of(['model', *OF_HUGGING_FACE])}")
    model = fields.get("model")
    if registry.is_lent(model):
        why = "verify runs in another process; name the function, as package.module:function"
        raise refuse(spell("model"), model, why)
    if isinstance(model, dict) or (model or "").lstrip().startswith((PREFIX, "{")):
        sizes = {"batch_size": 1, "seq_len": 1, "device": "cpu"}
        return StandIn.of(make_experiment(sizes | fields | {"method": method})) or BUILT_IN
    if options := ", ".join(spell(name) for name in OF_HUGGING_FACE if name in fields):
        raise InputError(f"{options}: only for {PREFIX}NAME, a Hugging Face model")
    if model is None:
        if stand_in is None:
            raise InputError(f"missing: {spell('model')}, or {spell('stand_in')}")
        return read_stand_in(Path(stand_in))
    models = [BUILT_IN, *registry.names("models")]
    if is_code(model):
        registry.check("models", model, spell("model"))
    elif model not in models:
        raise refuse(spell("model"), model, f"{one_of(models, model)}, or {PREFIX}NAME")
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
        "--stand-in", **FILE, help="the file of such a small model, as planning writes it"
    )
    for name in OF_HUGGING_FACE:
        parser.add_argument(f"--{name}", metavar="VALUE", help="as of an experiment")
    parser.add_argument("--method", required=True, help="a method's name")
    parser.add_argument(
        "--output",
        **FILE,
        help="the verdict's file to write (default: results/verify/MODEL-METHOD.json)",
    )
    arguments = parser.parse_and_log(argv, "what else is printed")
    names = ("model", "method", "stand_in", "output", *OF_HUGGING_FACE)
    with ending_in_a_sentence("no verdict was written"):
        verified = verify(**{name: getattr(arguments, name) for name in names})
    say(str(verified))
