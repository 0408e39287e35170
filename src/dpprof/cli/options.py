"""Reads an experiment from command-line options, one for every field.

argparse does it: pydantic-settings is no dependency, and its errors are not one sentence.
"""

import argparse
import itertools
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from dpprof.spec import registry
from dpprof.spec.architecture import PREFIX
from dpprof.spec.config_files import parse_config_text
from dpprof.spec.experiment import Experiment, read_spec, settle_device
from dpprof.spec.privacy import Privacy
from dpprof.spec.tasks import TASKS
from dpprof.spec.validation import InputError, explain, option_name, refuse
from dpprof.system.hardware import resolve_device

TASK_HELP = (
    f"what a Hugging Face model is trained for, its key task: {', '.join(TASKS)} (default: what is "
    "usual for its architecture)"
)


def add_experiment_options(
    parser: argparse.ArgumentParser,
    leave_out: Container[str] = (),
    several: Container[str] = (),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add an option for every field of an experiment, described as in the schema.

    Those in ``several`` take one or more values, and collect those of every time they are given.
    ``notes`` adds to the description of a field.
    """
    group = parser.add_argument_group("experiment")
    for name, field in Experiment.model_fields.items():
        if name in leave_out:
            continue
        default = "auto" if name == "device" else field.default
        required = field.is_required() and name != "device"
        note = "required" if required else f"default: {default}"
        described = "; ".join(filter(None, [field.description, notes.get(name)]))
        help_text = f"{described} ({note})".replace("%", "%%")
        many: dict[str, Any] = {"nargs": "+", "action": "extend"} if name in several else {}
        group.add_argument(option_name(name), help=help_text, metavar="VALUE", **many)
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


def read_privacy(arguments: argparse.Namespace) -> Privacy:
    """Return the privacy budget of parsed options.

    Raises:
        InputError: An option's value is not allowed, or a required one is missing.
    """
    given = {name: getattr(arguments, name) for name in Privacy.model_fields}
    try:
        return Privacy.model_validate({k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        raise explain(error, Privacy, options=True) from None


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
    given = {name: getattr(arguments, name, None) for name in ("task", *Experiment.model_fields)}
    return {name: value for name, value in given.items() if value is not None}


def read_experiments(arguments: argparse.Namespace, **axis: list[Any]) -> list[Experiment]:
    """Return the experiment of parsed options in every combination of the values of other fields.

    ``axis`` holds fields with their values, which replace those of options; lists multiply.

    Raises:
        InputError: An option's value is not allowed, a required one is missing, or a list has a
            value twice.
    """
    given = read_given(arguments)
    combinations = itertools.product(*axis.values())
    found = [
        make_experiment(given | dict(zip(axis, values, strict=True))) for values in combinations
    ]
    for name, values in axis.items():
        if len({getattr(one, name) for one in found}) < len(values):
            raise refuse_repeated(option_name(name), values)
    return found


def refuse_repeated(option: str, values: Iterable[Any]) -> InputError:
    """Return the error that refuses a list with a value that it has already."""
    return refuse(option, " ".join(map(str, values)), "give each value once")


def _move_task(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with the option ``--task`` as a key of the model, where it is given.

    Raises:
        InputError: The model is no Hugging Face model, or has a task already.
    """
    if "task" not in fields:
        return fields
    model, task = fields.get("model"), fields["task"]
    if isinstance(model, str) and model.startswith(PREFIX):
        model = {"hf": model}
    if not (isinstance(model, dict) and "hf" in model) or "task" in model:
        why = f"it is a key of a Hugging Face model, as --model {PREFIX}NAME, and is given once"
        raise refuse("--task", task, why)
    others = {name: one for name, one in fields.items() if name != "task"}
    return others | {"model": model | {"task": task}}


def make_experiment(fields: dict[str, Any]) -> Experiment:
    """Return an experiment from the fields given as options.

    Raises:
        InputError: An option's value is not allowed, or a required one is missing.
    """
    for name in ("model", "target"):
        if fields.get(name, "").lstrip().startswith("{"):
            try:
                fields[name] = parse_config_text(fields[name])
            except InputError as error:
                allowed = f"it must be a mapping, in YAML, and {error}"
                raise refuse(f"--{name}", fields[name], allowed) from None
    fields = _move_task(fields)
    try:
        experiment = Experiment.model_validate(settle_device(fields, resolve_device, "--device"))
    except ValidationError as error:
        names = registry.names_by_key()
        raise explain(error, Experiment, options=True, names=names) from None
    if isinstance(experiment.model, str):
        registry.check("models", experiment.model, "--model")
    registry.check("methods", experiment.method, "--method")
    if isinstance(experiment.target, str):
        registry.check("targets", experiment.target, "--target")
    return experiment
