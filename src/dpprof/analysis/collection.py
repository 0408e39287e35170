"""The results of one config: what exists, what is missing, what the code has outgrown."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dpprof.analysis.verified import read_standings
from dpprof.ceilings import Ceilings, read_ceilings
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

    ceilings: tuple[Ceilings, ...] = ()
    """Those of the devices that the runs are on, as far as there are any."""


def collect(
    manifest: Manifest, root: Path, *, partial: bool, ceilings: Iterable[Path] = ()
) -> Collected:
    """Read the results that a manifest lists, and no others, and the verdicts on their methods.

    Args:
        manifest: The runs of a config.
        root: The folder that holds ``results``.
        partial: Whether runs without a result, and ceilings, may be left out.
        ceilings: The files of ceilings of the devices that the runs are on.

    Raises:
        ResultError: A file is cut, edited, of another version, or another run's.
        InputError: A result is missing, or ceilings are, and ``partial`` is not set.
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
    return Collected(
        tuple(found),
        tuple(missing),
        frozenset(outdated),
        standings,
        tuple(_read_ceilings(ceilings, partial=partial)),
    )


def _read_ceilings(paths: Iterable[Path], *, partial: bool) -> Iterator[Ceilings]:
    for path in paths:
        try:
            yield read_ceilings(path)
        except FileNotFoundError:
            if not partial:
                raise InputError(f"{path}: is missing; run snakemake") from None


def _planned_digest(root: Path, name: str) -> str | None:
    path = root / code_path(name)
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None
