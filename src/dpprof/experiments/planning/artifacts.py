"""The files that rules make or depend on: what each is called, and the code it rests on.

A new kind of record is one more entry in ``RECORD_KINDS``, and what makes a ``Plan`` list it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.planning.code_digest import (
    ceilings_digest,
    code_digest,
    foreign_parts,
    model_libraries,
    verdict_digest,
)
from dpprof.experiments.records.ceilings import CEILINGS, ceilings_path, read_ceilings
from dpprof.experiments.records.record import read_record
from dpprof.experiments.records.result import read_result
from dpprof.experiments.records.verdict import BUILT_IN, VERDICTS, Verdict, verdict_path

RESULTS = Path("results")
PLAN = RESULTS / "plan"
TABLES = RESULTS / "tables"
PLAN_FILES = (
    "specs/*.json",
    "stand-ins/*.json",
    "code/*.sha256",
    "manifest-*.json",
    "due-*.txt",
)
"""Patterns of what planning writes."""


def spec_path(experiment_id: str) -> Path:
    """Return the path of an experiment's spec, relative to the working folder."""
    return PLAN / "specs" / f"{experiment_id}.json"


def stand_in_path(label: str) -> Path:
    """Return the path of the model that a verdict is about, relative to the working folder."""
    return PLAN / "stand-ins" / f"{label}.json"


def traces_path(experiment_id: str, replicate: int) -> Path:
    """Return the folder of a run's trace files, relative to the working folder."""
    return RESULTS / "traces" / experiment_id / f"r{replicate}"


def code_path(name: str) -> Path:
    """Return the path of a code digest: ``<instrument>-<method>``, ``tables``, ``report`` ..."""
    return PLAN / "code" / f"{name}.sha256"


class Code(NamedTuple):
    """Code that a file rests on, by name, and how to find its present digest."""

    name: str
    digest: Callable[[], str]

    @property
    def path(self) -> Path:
        """The file of the planned digest, relative to the working folder."""
        return code_path(self.name)

    def planned(self, root: Path) -> str | None:
        """Return the digest as planned last; None where it was not."""
        path = root / self.path
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        return text and text.strip()


def code_of_run(instrument: str, experiment: Experiment) -> Code:
    """Return the code that measures an experiment under an instrument."""
    foreign = (name for _, name in foreign_parts(experiment))
    name = "-".join([instrument, experiment.method, *foreign, *model_libraries(experiment)])
    return Code(name, partial(code_digest, instrument, experiment))


def code_of_verdict(model: str, method: str) -> Code:
    """Return the code that a verdict rests on."""
    name = "-".join(["verify", method, *([] if model == BUILT_IN else [model])])
    return Code(name, partial(verdict_digest, model, method))


CODE_OF_CEILINGS = Code(CEILINGS, ceilings_digest)


class RecordKind(NamedTuple):
    """A kind of record: where its files and logs are, and how to read them."""

    pattern: str  # the files in ``results`` and the logs in ``results/logs``, without their ending
    read: Callable[[Path], Any]
    code_of: Callable[[Any], Code]  # returns the code that a record rests on


RUN = RecordKind("*/*.r*", read_result, lambda run: code_of_run(run.instrument, run.experiment))
VERDICT = RecordKind(
    f"{VERDICTS}/*",
    lambda path: read_record(path, Verdict),
    lambda verdict: code_of_verdict(verdict.model, verdict.method),
)
LIMITS = RecordKind(f"{CEILINGS}/*", read_ceilings, lambda _: CODE_OF_CEILINGS)
RECORD_KINDS = (RUN, VERDICT, LIMITS)


@dataclass(frozen=True)
class Artifact:
    """A planned record."""

    kind: RecordKind
    path: Path  # relative to the working folder
    code: Code

    @property
    def log(self) -> Path:
        """The path of its log."""
        return RESULTS / "logs" / self.path.parent.name / f"{self.path.stem}.log"


def verdict_on(model: str, method: str) -> Artifact:
    """Return the verdict on a method."""
    return Artifact(VERDICT, verdict_path(Path(), model, method), code_of_verdict(model, method))


def ceilings_of(device: str) -> Artifact:
    """Return the ceilings of a device."""
    return Artifact(LIMITS, ceilings_path(Path(), device), CODE_OF_CEILINGS)
