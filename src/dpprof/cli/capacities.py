"""Finds the capacity of several methods at once: one process each, as many as there are cores."""

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dpprof.cli.common import path
from dpprof.cli.options import add_experiment_options, read_experiments
from dpprof.launch.supervisor import supervise
from dpprof.planning.code_digest import code_digest
from dpprof.records.record import ResultError
from dpprof.records.result import Result, read_run, result_path
from dpprof.spec import registry
from dpprof.spec.experiment import Experiment
from dpprof.spec.validation import InputError
from dpprof.system.hardware import available_cores

INSTRUMENT = "capacity"
_FINAL = ("ok", "oom", "unsupported")


def add_capacity_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the experiments whose capacity to find."""
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="the methods (default: all)")
    parser.add_argument(
        "--json", type=path, metavar="FILE", help="write the results as JSON to this file"
    )
    parser.add_argument(
        "--again", action="store_true", help="ignore existing results in results/capacity"
    )
    add_experiment_options(parser, leave_out=("method", "batch_size"))


def read_capacity_options(arguments: argparse.Namespace) -> list[Experiment]:
    """Return one experiment per method from parsed options.

    Raises:
        InputError: An option's value is not allowed, or a required one is missing.
    """
    methods = arguments.methods or registry.names("methods")
    for method in methods:
        registry.check("methods", method, "--methods")
    if arguments.target is None:
        raise InputError(
            f"--target: missing; a target's name ({', '.join(registry.names('targets'))}) or a "
            "mapping of memory_bytes, flops_per_s and bandwidth_bytes_per_s"
        )
    return read_experiments(arguments, method=list(dict.fromkeys(methods)), batch_size=[1])


def find_capacities(
    experiments: Sequence[Experiment], root: Path, *, again: bool, tell: Callable[[Result], None]
) -> list[Result]:
    """Find the capacity of each experiment, or read it from results that are still valid.

    Args:
        experiments: The experiments; their batch size does not matter.
        root: The folder that holds ``results``, where every result is stored.
        again: Whether to ignore existing results.
        tell: Called with each result as soon as it exists.
    """

    def find(experiment: Experiment) -> Result:
        known = None if again else _read_known(root, experiment)
        log = root / "results" / "logs" / INSTRUMENT / f"{experiment.id}.r0.log"
        output = result_path(root, INSTRUMENT, experiment.id, 0)
        result = known or supervise(experiment, INSTRUMENT, 0, output, log)
        tell(result)
        return result

    pool = ThreadPoolExecutor(max_workers=available_cores())
    try:
        return list(pool.map(find, experiments))
    except KeyboardInterrupt:
        # The workers die with this process, so an interruption need not wait for them.
        os._exit(130)


def _read_known(root: Path, experiment: Experiment) -> Result | None:
    try:
        result = read_run(root, INSTRUMENT, experiment.id, 0)
    except (FileNotFoundError, ResultError):
        return None
    current = result.code_digest == code_digest(INSTRUMENT, experiment)
    return result if current and result.outcome in _FINAL else None
