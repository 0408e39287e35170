"""What ``dpprof compare`` says: what got worse from one folder of results to another."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from dpprof.experiments.config.quantities import optional
from dpprof.experiments.config.validation import one_of
from dpprof.experiments.records.record import Part
from dpprof.experiments.records.terms import COMPONENTS

Metric = Literal["memory", "flops", "launches", "time"]
METRICS: tuple[Metric, ...] = get_args(Metric)

Across = Literal["versions", "device", "settings"]
ACROSS: tuple[Across, ...] = get_args(Across)

Judgement = Literal["worse", "better", "within threshold", "same", "undecided"]
JUDGEMENTS: tuple[Judgement, ...] = get_args(Judgement)

Verdict = Literal["nothing worse", "regression", "not comparable"]
EXIT_STATUS: Mapping[Verdict, Literal[0, 1, 2]] = {
    "nothing worse": 0,
    "regression": 1,
    "not comparable": 2,
}

FigureName = Literal[
    "outcome",
    "peak",
    "peak of the first step",
    "component",
    "reserved",
    "reserved with expandable segments",
    "fits",
    "largest batch",
    "largest safe batch",
    "executed FLOPs",
    "other FLOPs",
    "model FLOPs",
    "FLOPs",
    "bytes moved",
    "bytes sent",
    "launches",
    "step time",
    "predicted step time",
]


_PERCENTAGE = r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*"


def _read_share(value: Any) -> float:
    """Return a percentage as a share; a bare number other than 0 could mean either."""
    if isinstance(value, str) and (match := re.fullmatch(_PERCENTAGE, value)):
        return float(Decimal(match[1]) / 100)
    if isinstance(value, bool) or value != 0:
        raise ValueError("it must be 0 or a percentage, such as 2%")
    return 0.0


def _check_component(name: str) -> str:
    if name not in COMPONENTS:
        raise ValueError(one_of(COMPONENTS, name))
    return name


Share = Annotated[
    float,
    BeforeValidator(_read_share),
    WithJsonSchema(
        {"anyOf": [{"const": 0}, {"type": "string", "pattern": f"^{_PERCENTAGE}$"}]},
        mode="validation",
    ),
]
"""A share of the baseline, written as a percentage: ``2%`` is 0.02."""


class Thresholds(Part):
    """By how much of the baseline a figure may get worse, by kind of figure.

    Example:
        >>> Thresholds.model_validate({"components": {"noise": "2%"}}).components
        {'noise': 0.02}
    """

    memory: Share = Field(
        0.0, description="peaks, components without a threshold of their own, largest batches"
    )
    components: dict[Annotated[str, AfterValidator(_check_component)], Share] = Field(
        default_factory=dict, description="bytes of a component at the peak, by its name"
    )
    flops: Share = Field(0.0, description="FLOPs, in total and of each op kind in each phase")
    bytes_moved: Share = Field(
        0.0,
        description="bytes moved, in total and by each op kind in each phase, and bytes that ranks "
        "send",
    )
    launches: Share = Field(0.0, description="operators that start a kernel")
    time: Share = Field(0.05, description="step times, measured and predicted")


class TimeStatistics(Part):
    """What a verdict on a step time rests on; docs/numbers/statistics.md."""

    baseline_processes: int
    candidate_processes: int
    ratio_low: float | None = Field(description="of the 95 % bootstrap interval of the ratio")
    ratio_high: float | None
    p_value: float | None = Field(description="two-sided Mann-Whitney")
    noise_floor: float | None = Field(
        description="a share: how far from 1 the ratio of equal experiments lies by noise alone"
    )


class ComparedFigure(Part):
    """A figure of the same runs on both sides."""

    experiment_id: str
    instrument: str
    metric: Literal["outcome"] | Metric
    figure: FigureName
    part: str | None = optional("of component the component; of FLOPs and bytes moved the op kind")
    phase: str | None = optional("of FLOPs and bytes moved, with part")
    unit: Literal["bytes", "FLOPs", "launches", "samples", "seconds"] | None = None
    baseline: int | float | str | None = optional(
        "median over replicates; of outcome a text; null: not known"
    )
    candidate: int | float | str | None = None
    ratio: float | None = optional("candidate over baseline; null where that is 0")
    threshold: float | None = optional("a share of the baseline")
    judgement: Judgement
    reason: str | None = optional("what else is to know of it")
    statistics: TimeStatistics | None = None


class Unlike(Part):
    """What makes runs not comparable, and of which experiments."""

    kind: Across
    name: str = Field(description="device, threads, a package, a setting")
    baseline: str
    candidate: str
    experiment_ids: list[str]


class Run(Part):
    """An experiment under an instrument, with all replicates."""

    experiment_id: str
    instrument: str


class Explanation(Part):
    """The command that explains why a run needs more memory."""

    experiment_id: str
    instrument: str
    command: str


class FolderComparison(Part):
    """The comparison of two folders of results."""

    schema_version: Literal[1] = 1
    verdict: Verdict
    exit_status: Literal[0, 1, 2]
    reason: str | None = Field(description="why not everything could be compared")
    baseline: str = Field(description="the folder")
    candidate: str
    metrics: list[Metric]
    across: list[Across] = Field(description="what may differ")
    thresholds: Thresholds
    experiments: int = Field(description="number of experiments on both sides")
    runs: int = Field(description="of these, under each instrument")
    counts: dict[Judgement, int] = Field(description="number of figures by judgement")
    judged: dict[Metric, int] = Field(description="number of figures that were decided, by metric")
    figures: list[ComparedFigure] = Field(
        description="all but those that are the same, the worst first"
    )
    not_comparable: list[Unlike]
    only_in_baseline: list[Run]
    only_in_candidate: list[Run]
    explanations: list[Explanation]
