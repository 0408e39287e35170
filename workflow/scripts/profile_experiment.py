"""Measure one experiment in a process of its own and leave one JSON file.

The experiment is either a spec file (``--spec``) or given by options; every option of
an experiment is a key of the config file. The exit status is 0 whenever the JSON was
written, out of memory and crashes included: what came of the experiment is in it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import _source_tree  # noqa: F401
from dpprof import catalogue
from dpprof.experiment import Experiment, read_spec
from dpprof.hardware import resolve_device
from dpprof.progress import Progress, run_name, tell_result
from dpprof.supervisor import supervise
from dpprof.validation import InputError, explain, refuse


def make_parser() -> argparse.ArgumentParser:
    """Make the options: the run's own, then one for every field of an experiment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--spec", type=Path, help="spec file, instead of the options below")
    parser.add_argument("--instrument", default="clean", help="what watches (default: clean)")
    parser.add_argument("--replicate", type=natural, default=0, help="number of the repetition")
    parser.add_argument("--output", type=Path, required=True, help="the result file to write")
    parser.add_argument("--log", type=Path, help="where the worker's output goes (default: here)")
    group = parser.add_argument_group("experiment")
    for name, field in Experiment.model_fields.items():
        default = "auto" if name == "device" else field.default
        note = "" if field.is_required() and name != "device" else f" (default: {default})"
        help_text = f"{field.description}{note}".replace("%", "%%")
        group.add_argument(f"--{name.replace('_', '-')}", help=help_text, metavar="VALUE")
    return parser


def natural(text: str) -> int:
    """Read a number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be 0, 1, 2 ...")
    return int(text)


def read_experiment(arguments: argparse.Namespace) -> Experiment:
    """Turn the command line into an experiment.

    Raises:
        InputError: An option's value is not allowed, or a required one is missing.
    """
    given = {name: getattr(arguments, name) for name in Experiment.model_fields}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if arguments.spec is not None:
        if fields:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in fields)
            raise InputError(f"--spec is the whole experiment; leave out {options}")
        return read_spec(arguments.spec)
    if fields.get("model", "").lstrip().startswith("{"):
        try:
            fields["model"] = yaml.safe_load(fields["model"])
        except yaml.YAMLError:
            raise refuse("--model", fields["model"], "it must be a mapping, in YAML") from None
    if fields.get("device", "auto") == "auto":
        fields["device"] = resolve_device()
    try:
        experiment = Experiment.model_validate(fields)
    except ValidationError as error:
        raise explain(error, Experiment, options=True) from None
    if isinstance(experiment.model, str):
        catalogue.check("models", experiment.model, "--model")
    catalogue.check("methods", experiment.method, "--method")
    return experiment


def main() -> None:
    """Run from the command line."""
    arguments = make_parser().parse_args()
    try:
        experiment = read_experiment(arguments)
        catalogue.check("instruments", arguments.instrument, "--instrument")
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    name = run_name(experiment.id, arguments.instrument, arguments.replicate)
    progress = Progress.current()
    if progress is not None:
        progress.announce(name)
    result = supervise(
        experiment, arguments.instrument, arguments.replicate, arguments.output, arguments.log
    )
    if progress is not None:
        progress.conclude(name, result)
    tell_result(result)


if __name__ == "__main__":
    main()
