"""How much worse a figure may get before ``dpprof compare`` calls it a regression."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from dpprof.experiments.config.validation import one_of
from dpprof.experiments.records.record import Part
from dpprof.experiments.records.terms import COMPONENTS

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
