"""Verdicts on whether a method computes the reference's gradient: one JSON per model and method.

A verdict also covers what the method declares: its mechanism, and how far one sample can move the
sum. Its holes are the cases beyond the gradient in which the guarantee is lost.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from dpprof.experiments.config.mechanisms import FLAT, NO_CLIPPING
from dpprof.experiments.config.quantities import optional
from dpprof.experiments.records.record import Part, ResultError, read_record

TOLERANCE = 1e-9  # the largest relative error in float64 that counts as rounding

BUILT_IN = "built-in"
"""The model that represents every size of dpprof's own transformer, whose layers are the same."""

STAND_IN_PREFIX = "hf-"
"""What the names of the small models begin with that stand for Hugging Face models."""

STAND_IN_PATTERN = STAND_IN_PREFIX + r"[a-z0-9-]+-[0-9a-f]{8}"
"""The names of those models; the digits are of what they are."""

Scenario = Literal[
    "plain",
    "ignored labels",
    "frozen",
    "other padding",
    "frozen later",
    "thawed later",
    "non-finite",
    "empty",
    "accumulated",
]
GRADIENT_SCENARIOS: tuple[Scenario, ...] = ("plain", "ignored labels", "frozen", "other padding")
"""The scenarios that decide whether a method passed; the last one takes a padded batch."""

HOLES: Mapping[Scenario, str] = {
    "frozen later": "parameters frozen after set-up",
    "thawed later": "a layer thawed after set-up",
    "non-finite": "one non-finite sample",
    "empty": "an empty batch",
    "accumulated": "gradients that were not cleared",
}
"""The other scenarios, in which a guarantee can be lost, with their names in holes."""

VERDICTS = "verify"  # the name of the folder for verdicts in ``results``


class Case(Part):
    """One comparison: a variant of the model, a batch size and a scenario."""

    scenario: Scenario = Field("plain", description="what distinguishes the case from a plain step")
    attention: str
    batch_size: int
    outcome: Literal["passed", "failed", "unsupported", "unknown"] = Field(
        description="unsupported: the method refuses the case; unknown: the case has no "
        "reference or was not tried"
    )
    reason: str | None = optional("why it did not pass")
    max_grad_norm: float | None = optional("clipping bound of the method")
    groups: int | None = optional(
        "number of parameter groups, each clipped by its own norm; 0 where nothing is clipped"
    )
    norms_clipped: int | None = optional(
        "how many of the batch_size x groups norms exceed their bound"
    )
    sensitivity: float | None = optional(
        "square root of the sum of the groups' squared bounds, over the bound that "
        "the noise is a multiple of"
    )
    references: list[str] = Field(
        default_factory=list, description="the references it was compared with"
    )
    max_relative_error: float | None = optional(
        "of the gradient: L2 norm of the difference over that of the reference"
    )
    max_relative_error_of_norms: float | None = optional(
        "of the per-sample norms before clipping, over the sample's whole norm; null "
        "where the method does not store them"
    )


class Verdict(Part):
    """One JSON file per model and method. Every key is always present; unknown values are null."""

    schema_version: Literal[2] = 2
    model: str = Field(
        description=f"a name; {BUILT_IN}: dpprof's own transformer of any size; or "
        f"{STAND_IN_PREFIX}...: the small model that stands for a Hugging Face model of any size"
    )
    method: str
    mechanism: str | None = Field(
        description=f"what the method declares: {FLAT}, {NO_CLIPPING}, or another; null: unknown"
    )
    passed: bool | None = Field(description="null: unknown, see reason")
    reason: str | None = Field(description="why it did not pass, or what it does not cover")
    tolerance: float
    holes: list[str] = Field(description="where the guarantee was lost; holes do not affect passed")
    max_relative_error: float | None = Field(
        description="of gradients, over the cases that decide passed"
    )
    max_relative_error_of_norms: float | None
    references: list[str]
    cases: list[Case]
    code_digest: str = Field(description="sha256 of the sources and versions that it is about")
    content_digest: str = Field(description="sha256 of the canonical JSON of everything else")
    wall_s: float
    provenance: dict[str, Any]

    def stands_for(self, attention: str) -> "Standing":
        """Return the standing of experiments with this variant of attention.

        A method that failed in any case has failed. A method that passed may refuse this variant.
        """
        passed, reason = self.passed, self.reason
        if passed:
            passed, reason = judge([case for case in self.cases if case.attention == attention])
        whole = [case for case in self.cases if case.scenario == "plain"]
        compared = [case for case in whole if case.groups is not None]
        return Standing(
            verified=passed,
            reason=None if passed else reason,
            max_relative_error=self.max_relative_error,
            max_relative_error_of_norms=self.max_relative_error_of_norms,
            reference=" and ".join(self.references) or None,
            groups=compared[0].groups if compared else None,
            sensitivity=compared[0].sensitivity if compared else None,
            mechanism=self.mechanism,
            holes=_HOLE_ENDS.join(self.holes) or None,
        )


class Standing(NamedTuple):
    """The verification standing of an experiment's method."""

    verified: bool | None
    reason: str | None
    max_relative_error: float | None = None
    max_relative_error_of_norms: float | None = None
    reference: str | None = None
    groups: int | None = None
    sensitivity: float | None = None
    mechanism: str | None = None
    holes: str | None = None  # the holes as one text, see ``split_holes``


class Findings(NamedTuple):
    """The findings of a verification."""

    mechanism: str | None
    cases: list[Case]


def judge(cases: Sequence[Case]) -> tuple[bool | None, str | None]:
    """Return whether a method passed, and why not or what the cases leave out.

    Only ``GRADIENT_SCENARIOS`` count. One failed case is a failure. A refused case is not, but at
    least one case must pass. With a case without a reference the result is unknown.
    """
    cases = judged(cases)
    first = {case.outcome: case for case in reversed(cases)}
    if "failed" in first:
        return False, _format_case(first["failed"])
    if "unknown" in first:
        return None, _format_case(first["unknown"])
    refused = _format_case(first["unsupported"]) if "unsupported" in first else None
    return (True, refused) if "passed" in first else (None, refused or "nothing was compared")


_HOLE_ENDS = "; "


def judged(cases: Sequence[Case]) -> list[Case]:
    """Return the cases that decide whether a method passed."""
    return [case for case in cases if case.scenario in GRADIENT_SCENARIOS]


def name_holes(cases: Sequence[Case]) -> list[str]:
    """Return short sentences on where the guarantee was lost."""
    failed = [case for case in cases if case.outcome == "failed"]
    return [f"{HOLES[case.scenario]}: {case.reason}" for case in failed if case.scenario in HOLES]


def split_holes(holes: str) -> list[str]:
    """Return the holes that a table stores in one cell."""
    return holes.split(_HOLE_ENDS)


def _format_case(case: Case) -> str:
    where = f"attention {case.attention}, B = {case.batch_size}"
    where += "" if case.scenario == "plain" else f", {case.scenario}"
    return f"{where}: {case.reason}"


def is_stand_in(model: str) -> bool:
    """Return whether a verdict's model is the stand-in of a Hugging Face model."""
    return re.fullmatch(STAND_IN_PATTERN, model) is not None


def verdict_path(root: Path, model: str, method: str) -> Path:
    """Return the path of a verdict: ``results/verify/<model>-<method>.json``."""
    return root / "results" / VERDICTS / f"{model}-{method}.json"


def read_verdict(root: Path, model: str, method: str) -> Verdict:
    """Read the verdict on a method on a model.

    Raises:
        ResultError: The file is cut, edited, of another schema version, or about others.
        FileNotFoundError: There is no verdict yet.
    """
    path = verdict_path(root, model, method)
    verdict = read_record(path, Verdict)
    if (verdict.model, verdict.method) != (model, method):
        raise ResultError(path, f"is about another pair, {verdict.method} on {verdict.model}")
    return verdict
