"""Experiments from the keywords or the options with which a question is asked."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dpprof.ask.defaults import add_defaults
from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import PREFIX
from dpprof.experiments.config.config_files import parse_config_text
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import settle_device
from dpprof.experiments.config.validation import InputError, explain, refuse, spell
from dpprof.experiments.planning.code_digest import read_anew
from dpprof.system.hardware import resolve_device


@contextlib.contextmanager
def naming(keywords: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield keywords, without those that are None; a function that builds the model has a name.

    The name holds within this context. The code on disk is looked at anew: it may have been edited
    since the last question.
    """
    read_anew()
    fields = {name: value for name, value in keywords.items() if value is not None}
    model = fields.get("model")
    if hasattr(model, "state_dict"):
        name = type(model).__name__
        raise refuse(spell("model"), name, "give a function that builds and returns it")
    if not callable(model):
        yield fields
        return
    with registry.lent(model) as name:
        yield fields | {"model": name}


def make_experiment(options: Mapping[str, Any], *, for_question: bool = False) -> Experiment:
    """Return an experiment from its fields, which may be texts as on the command line.

    A question about a GPU takes what people train with there for granted, see ``add_defaults``.

    Raises:
        InputError: A value is not allowed, or a required one is missing.
    """
    fields = dict(options)
    for name in ("model", "target"):
        text = fields.get(name)
        if isinstance(text, str) and text.lstrip().startswith("{"):
            try:
                fields[name] = parse_config_text(text)
            except InputError as error:
                allowed = f"it must be a mapping, in YAML, and {error}"
                raise refuse(spell(name), text, allowed) from None
    fields = _move_task(add_defaults(fields) if for_question else fields)
    try:
        experiment = Experiment.model_validate(
            settle_device(fields, resolve_device, spell("device"))
        )
    except ValidationError as error:
        names = registry.names_by_key()
        raise explain(error, Experiment, options=True, names=names) from None
    if isinstance(experiment.model, str):
        registry.check("models", experiment.model, spell("model"))
    registry.check("methods", experiment.method, spell("method"))
    if isinstance(experiment.target, str):
        registry.check("targets", experiment.target, spell("target"))
    return experiment


def _move_task(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with ``task`` as a key of the model; refuse one that cannot have it."""
    if "task" not in fields:
        return fields
    model, task = fields.get("model"), fields["task"]
    if isinstance(model, str) and model.startswith(PREFIX):
        model = {"hf": model}
    if not (isinstance(model, dict) and "hf" in model) or "task" in model:
        where = spell("model")
        why = f"it is a key of a Hugging Face model, as {where} {PREFIX}NAME, and is given once"
        raise refuse(spell("task"), task, why)
    others = {name: value for name, value in fields.items() if name != "task"}
    return others | {"model": model | {"task": task}}


def multiply(fields: Mapping[str, Any], **axis: list[Any]) -> list[Experiment]:
    """Return the experiment of a question for every combination of the values of some fields.

    ``axis`` holds these fields with their values; ``fields`` holds all others.

    Raises:
        InputError: A value is not allowed, a required one is missing, or a list has a value twice.
    """
    combinations = itertools.product(*axis.values())
    experiments = [
        make_experiment({**fields, **dict(zip(axis, values, strict=True))}, for_question=True)
        for values in combinations
    ]
    for name, values in axis.items():
        if len({getattr(experiment, name) for experiment in experiments}) < len(values):
            raise refuse_repeated(name, values)
    return experiments


def refuse_repeated(key: str, values: Iterable[Any]) -> InputError:
    """Return the error that refuses a list with a value that it has already."""
    return refuse(spell(key), " ".join(map(str, values)), "give each value once")
