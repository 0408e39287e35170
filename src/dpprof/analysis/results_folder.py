"""Reads all results of a folder, whatever config they are of."""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from dpprof.planning.artifacts import RESULTS, RUN
from dpprof.records.record import ResultError
from dpprof.records.result import Result, read_result
from dpprof.spec.validation import InputError, limit_lines

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
    found: dict[RunKey, list[Result]] = defaultdict(list)
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
        found[result.experiment_id, result.instrument].append(_without_details(result))
    if problems:
        raise InputError("\n".join(limit_lines(problems)))
    return {key: sorted(results, key=lambda one: one.replicate) for key, results in found.items()}


def _without_details(result: Result) -> Result:
    memory = result.memory
    if memory is None:
        return result
    at_peak = memory.at_peak
    if at_peak is not None:
        at_peak = at_peak.model_copy(update={"largest": [], "holdings": None})
    memory = memory.model_copy(update={"timeline": None, "snapshots": [], "at_peak": at_peak})
    return result.model_copy(update={"memory": memory, "kernels": None})
