"""The results of one config: what exists, what is missing, what the code has outgrown."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpprof.analysis.verified import read_standings
from dpprof.planning import Manifest, PlannedRun, code_name, code_path, verdict_code_name
from dpprof.result import Result, read_run
from dpprof.validation import InputError
from dpprof.verdict import Standing


@dataclass(frozen=True)
class Collected:
    """A manifest's runs with their results."""

    found: tuple[tuple[PlannedRun, Result], ...]
    missing: tuple[PlannedRun, ...]
    outdated: frozenset[tuple[str, str, int]]
    """Runs, as (id, instrument, replicate), measured by other code than was last planned."""

    standings: Mapping[str, Standing]
    """What is known of the method of each experiment that has a result, by the experiment's id."""


def collect(manifest: Manifest, root: Path, *, partial: bool) -> Collected:
    """Read the results that a manifest lists, and no others, and the verdicts on their methods.

    Args:
        manifest: The runs of a config.
        root: The folder that holds ``results``.
        partial: Whether runs without a result may be left out.

    Raises:
        ResultError: A file is cut, edited, of another version, or another run's.
        InputError: A result is missing, and ``partial`` is not set.
    """
    found: list[tuple[PlannedRun, Result]] = []
    missing: list[PlannedRun] = []
    for run in manifest.runs:
        try:
            found.append((run, read_run(root, run.instrument, run.id, run.replicate)))
        except FileNotFoundError:
            missing.append(run)
    if missing and not partial:
        raise InputError(
            f"{missing[0].path(root)}: is missing, and {len(missing) - 1} more; run snakemake, "
            "or snakemake --config partial=true to report on what exists"
        )
    outdated = {
        (run.id, run.instrument, run.replicate)
        for run, result in found
        if result.code_digest != _planned_digest(root, code_name(run.instrument, result.experiment))
    }
    standings = read_standings(
        root,
        (result.experiment for _, result in found),
        lambda *pair: _planned_digest(root, verdict_code_name(*pair)),
    )
    return Collected(tuple(found), tuple(missing), frozenset(outdated), standings)


def _planned_digest(root: Path, name: str) -> str | None:
    path = root / code_path(name)
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
