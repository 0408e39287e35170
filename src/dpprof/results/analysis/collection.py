"""The results of one config: which exist, which are missing, which older code measured."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.artifacts import code_of_run, code_of_verdict
from dpprof.experiments.planning.planner import Manifest, PlannedRun
from dpprof.experiments.records.ceilings import Ceilings, read_ceilings
from dpprof.experiments.records.record import ManyResultsError, ResultError
from dpprof.experiments.records.result import Result, read_run
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.standings import read_standings

NO_RESULT = "no result yet"
"""The reason for most missing runs; the others have a result that cannot be trusted."""


@dataclass(frozen=True)
class Collected:
    """A manifest's runs with their results."""

    runs: tuple[tuple[PlannedRun, Result], ...]
    missing: Mapping[PlannedRun, str]  # why runs have no result that can be trusted
    outdated: frozenset[tuple[str, str, int]]
    """Runs, as (id, instrument, replicate), that other code than the last planned one measured."""

    standings: Mapping[str, Standing]
    """The standing of the method of each experiment that has a result, by the experiment's id."""

    ceilings: tuple[Ceilings, ...] = ()  # the ceilings that exist for the devices of the runs
    damaged: tuple[ResultError, ...] = ()  # of files that a partial report leaves out


def collect(
    manifest: Manifest,
    root: Path,
    *,
    partial: bool,
    planned_in: Path | None = None,
    ceilings: Iterable[Path] = (),
    on_result: Callable[[PlannedRun, Result], None] | None = None,
) -> Collected:
    """Read the results that a manifest lists, the verdicts on their methods, and ceilings.

    ``root`` is the folder that holds ``results``, and ``planned_in`` the one with its plan, if that
    is another. ``ceilings`` are the files of the runs' devices. With ``partial``, missing and
    damaged files are left out. ``on_result`` is called with each result as it is read. After that
    call the result loses its large parts, such as its timeline, so that many results fit into
    memory.

    Raises:
        ResultError: Files are cut, edited, of another version, or another run's, and ``partial``
            is not set. The message names them all.
        InputError: A result or a ceilings file is missing, and ``partial`` is not set.
    """
    planned_in = planned_in or root
    damaged: list[ResultError] = []
    runs, missing = _read_runs(manifest, root, on_result, damaged)
    standings = read_standings(
        root,
        (result.experiment for _, result in runs),
        lambda *pair: code_of_verdict(*pair).planned(planned_in),
        damaged,
    )
    limits, absent = _read_ceilings(ceilings, damaged)
    if damaged and not partial:
        raise ManyResultsError(damaged) if len(damaged) > 1 else damaged[0]
    if missing and not partial:
        raise InputError(
            f"{next(iter(missing)).path(root)}: is missing, and {len(missing) - 1} more; run "
            "snakemake, or snakemake --config partial=true to report on the results that exist"
        )
    if absent and not partial:
        raise InputError(f"{absent[0]}: is missing; run snakemake")
    outdated = {
        (run.id, run.instrument, run.replicate)
        for run, result in runs
        if result.code_digest != code_of_run(run.instrument, result.experiment).planned(planned_in)
    }
    return Collected(tuple(runs), missing, frozenset(outdated), standings, limits, tuple(damaged))


def _read_runs(
    manifest: Manifest,
    root: Path,
    on_result: Callable[[PlannedRun, Result], None] | None,
    damaged: list[ResultError],
) -> tuple[list[tuple[PlannedRun, Result]], dict[PlannedRun, str]]:
    """Return runs with results, and why others have none; append errors to ``damaged``."""
    runs: list[tuple[PlannedRun, Result]] = []
    missing: dict[PlannedRun, str] = {}
    shared: dict[str, Any] = {}
    """The experiments and machines that results refer to, each once, by what they say."""
    for run in manifest.runs:
        try:
            result = read_run(root, run.instrument, run.id, run.replicate)
        except FileNotFoundError:
            missing[run] = NO_RESULT
        except ResultError as error:
            missing[run] = error.problem
            damaged.append(error)
        else:
            if on_result is not None:
                on_result(run, result)
                result = drop_details(result)
            parts = {name: getattr(result, name) for name in ("experiment", "device", "provenance")}
            parts = {name: shared.setdefault(repr(part), part) for name, part in parts.items()}
            runs.append((run, result.model_copy(update=parts)))
    return runs, missing


def drop_details(result: Result) -> Result:
    """Return a result without its large parts that no table but ``timeline`` shows."""
    update: dict[str, Any] = {"norm_plan": None}
    memory = result.memory
    if memory is not None and memory.at_peak is not None:
        at_peak = memory.at_peak.model_copy(update={"holdings": None})
        update["memory"] = memory.model_copy(update={"timeline": None, "at_peak": at_peak})
    others = {"compute": "flops_by_module", "io": "by_module", "kernels": "largest"}
    for name, large in others.items():
        if (part := getattr(result, name)) is not None:
            update[name] = part.model_copy(update={large: type(getattr(part, large))()})
    return result.model_copy(update=update)


def _read_ceilings(
    paths: Iterable[Path], damaged: list[ResultError]
) -> tuple[tuple[Ceilings, ...], list[Path]]:
    """Return the ceilings that can be read and the absent paths; append errors to ``damaged``."""
    ceilings: list[Ceilings] = []
    absent: list[Path] = []
    for path in paths:
        try:
            ceilings.append(read_ceilings(path))
        except FileNotFoundError:
            absent.append(path)
        except ResultError as error:
            damaged.append(error)
    return tuple(ceilings), absent
