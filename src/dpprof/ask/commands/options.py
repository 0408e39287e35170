"""Reads an experiment from command-line options, one for every field.

argparse does it: pydantic-settings is no dependency, and its errors are not one sentence.
"""

import argparse
from collections.abc import Container, Mapping
from typing import Any

from dpprof.ask.questions import make_experiment
from dpprof.experiments.config.experiment import Experiment, read_spec
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.tasks import TASKS
from dpprof.experiments.config.validation import InputError, option_name

TASK_HELP = (
    f"what a Hugging Face model is trained for, its key task: {', '.join(TASKS)} (default: what is "
    "usual for its architecture)"
)

_OF_RUNS_ALONE = frozenset(
    {
        "max_grad_norm",
        "learning_rate",
        "seed",
        "warmup_steps",
        "timed_steps",
        "wait_for_idle_gpu_s",
        "busy_gpu",
    }
)
"""What changes no answer of a question; ``dpprof profile --help`` describes it."""

_CODE = "or package.module:function, code of your own, which no file may name"


def add_experiment_options(
    parser: argparse.ArgumentParser,
    leave_out: Container[str] = (),
    several: Container[str] = (),
    notes: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add an option for every field of an experiment, described as in the schema.

    Those in ``several`` take one or more values, and collect those of every time they are given.
    ``notes`` adds to the description of a field; ``defaults`` are those of a question, whose help
    leaves out what changes no answer.
    """
    hidden = () if defaults is None else _OF_RUNS_ALONE
    notes = {"model": _CODE, **(notes or {})}
    defaults = {"device": "auto", **(defaults or {})}
    parser.usage = f"{parser.prog} --OPTION VALUE ..."  # all options would fill a screen
    group = parser.add_argument_group("experiment")
    for name, field in Experiment.model_fields.items():
        if name in leave_out:
            continue
        default = defaults.get(name, field.default)
        required = field.is_required() and name != "device"
        note = "required" if required else f"default: {default}"
        described = "; ".join(filter(None, [field.description, notes.get(name)]))
        help_text = f"{described} ({note})".replace("%", "%%")
        many: dict[str, Any] = {"nargs": "+", "action": "extend"} if name in several else {}
        group.add_argument(
            option_name(name),
            help=argparse.SUPPRESS if name in hidden else help_text,
            metavar="VALUE",
            **many,
        )
        if name == "model":
            group.add_argument("--task", help=TASK_HELP, metavar="VALUE")


def add_privacy_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of a privacy budget, described as in the schema."""
    group = parser.add_argument_group("privacy budget")
    for name, field in Privacy.model_fields.items():
        note = "required" if field.is_required() else f"default: {field.default}"
        several = "+" if name == "epsilon" else None
        help_text = f"{field.description} ({note})"
        group.add_argument(option_name(name), help=help_text, metavar="VALUE", nargs=several)


def read_experiment(arguments: argparse.Namespace) -> Experiment:
    """Return the experiment of parsed options, or of the spec file that ``--spec`` names.

    Raises:
        InputError: An option's value is not allowed, or a required one is missing.
        OSError: The spec file cannot be read.
    """
    fields = read_given(arguments)
    if arguments.spec is not None:
        if fields:
            options = ", ".join(map(option_name, fields))
            raise InputError(f"--spec is the whole experiment; leave out {options}")
        return read_spec(arguments.spec)
    return make_experiment(fields)


def read_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of an experiment that were given as options."""
    fields = {name: getattr(arguments, name, None) for name in ("task", *Experiment.model_fields)}
    return {name: value for name, value in fields.items() if value is not None}
