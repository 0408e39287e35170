"""Folders of results, and what must be equal in both for their runs to be compared."""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import InputError, limit_lines
from dpprof.experiments.planning.artifacts import RESULTS, RUN
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Result, read_result
from dpprof.results.analysis.collection import drop_details
from dpprof.results.analysis.conditions import Fact, facts_of

_NAME = re.compile(r".+\.r[0-9]+\.json")

RunKey = tuple[str, str]
"""The id of an experiment, and an instrument."""


class ResultsFolder(NamedTuple):
    """A folder of results."""

    path: Path
    """The folder that holds those of the instruments."""

    runs: dict[RunKey, list[Result]]
    """The replicates of each run, in order; without timelines and holdings, which are large."""


def read_results_folder(folder: Path) -> ResultsFolder:
    """Read ``<instrument>/<id>.r<N>.json`` in a folder, or in its folder ``results``.

    Raises:
        InputError: It is no folder or holds no results, or results cannot be trusted or lie where
            those of another run belong; the message names the files.
        OSError: A file cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; name one that holds results")
    pattern = f"{RUN.pattern}.json"
    for root in (folder, folder / RESULTS):
        if files := sorted(file for file in root.glob(pattern) if _NAME.fullmatch(file.name)):
            return ResultsFolder(root, _read_all(files))
    raise InputError(f"{folder}: holds no results, which are INSTRUMENT/ID.rN.json")


def _read_all(files: list[Path]) -> dict[RunKey, list[Result]]:
    runs: dict[RunKey, list[Result]] = defaultdict(list)
    problems: list[str] = []
    for file in files:
        try:
            result = read_result(file)
        except ResultError as error:  # its own message says to delete the file
            problems.append(f"{file}: {error.problem}")
            continue
        named = f"{result.experiment_id}.r{result.replicate}"
        if (result.instrument, named) != (file.parent.name, file.stem):
            problems.append(f"{file}: holds another run, {named} of {result.instrument}")
            continue
        runs[result.experiment_id, result.instrument].append(drop_details(result))
    if problems:
        raise InputError("\n".join(limit_lines(problems)))
    return {key: sorted(results, key=lambda r: r.replicate) for key, results in runs.items()}


_MOST_PAIRS = 20_000
"""How many pairs of experiments are looked at for the two that are most alike."""

_MOST_NAMED = 3
"""How many differences of two experiments are named."""


def find_differences(
    baseline: Sequence[Result], candidate: Sequence[Result]
) -> dict[Fact, tuple[str, str]]:
    """Return what differs between two sides of one run, with both sides' values.

    Replicates of one side that differ count too. Nothing ran for a prediction, so of its machine
    only the threads count, for a CPU's workspaces.
    """
    sides = _collect(baseline), _collect(candidate)
    facts = dict.fromkeys([*sides[0], *sides[1]])
    values = {fact: tuple(side.get(fact, {"none"}) for side in sides) for fact in facts}
    return {
        fact: (_join(was), _join(now))
        for fact, (was, now) in values.items()
        if was != now or len(was) > 1
    }


def _collect(results: Sequence[Result]) -> dict[Fact, set[str]]:
    values: dict[Fact, set[str]] = {}
    for result in results:
        for fact, value in facts_of(result).items():
            values.setdefault(fact, set()).add("none" if value is None else str(value))
    return values


def _join(values: set[str]) -> str:
    return " or ".join(sorted(values))


def explain_nothing_in_common(baseline: ResultsFolder, candidate: ResultsFolder) -> str:
    """Say that no run is in both folders, and how the most similar experiments differ."""
    if {name for name, _ in baseline.runs} & {name for name, _ in candidate.runs}:
        return "no experiment was run on both sides under the same instrument"
    sides = [
        {name: results[0].experiment for (name, _), results in side.runs.items()}.values()
        for side in (baseline, candidate)
    ]
    pairs = islice(product(*sides), _MOST_PAIRS)
    differences = [
        (a, b, [key for key in Experiment.model_fields if getattr(a, key) != getattr(b, key)])
        for a, b in pairs
    ]
    a, b, keys = min(differences, key=lambda pair: len(pair[2]))
    if len(keys) > _MOST_NAMED:
        return "no experiment is in both folders"
    differing = [
        f"{key} {str(getattr(a, key))[:80]} and {str(getattr(b, key))[:80]}" for key in keys
    ]
    return f"no experiment is in both folders; the most similar differ in {', '.join(differing)}"
