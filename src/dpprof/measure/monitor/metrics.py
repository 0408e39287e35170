"""Metrics of some steps of training: times, throughput and utilisation of the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

METRIC_NAMES = {
    "perf/step_time": "step_time_s",
    "perf/steps_per_second": "steps_per_s",
    "perf/samples_per_second": "samples_per_s",
    "perf/tokens_per_second": "tokens_per_s",
    "perf/mfu": "mfu",
    "perf/mfu_percent": "mfu_percent",
    "perf/hfu": "hfu",
    "perf/dp_flop_multiplier": "dp_flop_multiplier",
    "perf/carried": "carried",
    "perf/includes_profiling": "includes_profiling",
}
"""The attribute of ``Metrics`` under each name, in the order of writing."""


class Quantity(NamedTuple):
    """A number, or None with the reason why it is unknown."""

    value: float | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The last measurement. An unknown figure is None, and ``reasons`` says why."""

    measured_at_step: int
    """The profiled step at the end of the measurement."""

    carried: bool
    """Whether that is an earlier step than the last one."""

    includes_profiling: bool
    """Whether the timed steps were profiled, which makes them slower."""

    step_time_s: float
    """Mean over the timed steps, including the time between them."""

    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs, those of the non-private step, over elapsed time and the device's peak."""

    hfu: float | None
    """Executed FLOPs over elapsed time and peak; includes work that a private method adds."""

    dp_flop_multiplier: float | None
    """Executed over model FLOPs."""

    reasons: Mapping[str, str]
    """Why a figure is unknown, by its name."""

    @property
    def mfu_percent(self) -> float | None:
        """``mfu`` in percent."""
        return None if self.mfu is None else 100 * self.mfu

    @property
    def beyond_peak(self) -> bool:
        """Whether utilisation exceeds 1, so that some argument must be wrong."""
        return any(use is not None and use > 1 for use in (self.mfu, self.hfu))

    @cached_property
    def scalars(self) -> Mapping[str, float]:
        """The known figures by name."""
        figures = {name: getattr(self, attribute) for name, attribute in METRIC_NAMES.items()}
        return {name: float(value) for name, value in figures.items() if value is not None}


def derive_metrics(
    window: Mapping[str, int],
    elapsed_s: float,
    *,
    model: Quantity,
    executed: Quantity,
    peak: Quantity,
    step: int,
    includes_profiling: bool,
) -> Metrics:
    """Compute metrics of at least one timed step.

    ``window`` has the numbers of timed steps, and of their samples and tokens, by name; they took
    ``elapsed_s``. ``model`` and ``executed`` are FLOPs of a token, ``peak`` the device's FLOP/s.
    """
    tokens_per_s = window["tokens"] / elapsed_s
    mfu = _divide(model, peak, times=tokens_per_s)
    hfu = _divide(executed, peak, times=tokens_per_s)
    multiplier = _divide(executed, model)
    derived = {
        "perf/mfu": mfu,
        "perf/mfu_percent": mfu,
        "perf/hfu": hfu,
        "perf/dp_flop_multiplier": multiplier,
    }
    return Metrics(
        measured_at_step=step,
        carried=False,
        includes_profiling=includes_profiling,
        step_time_s=elapsed_s / window["steps"],
        steps_per_s=window["steps"] / elapsed_s,
        samples_per_s=window["samples"] / elapsed_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu.value,
        hfu=hfu.value,
        dp_flop_multiplier=multiplier.value,
        reasons={name: figure.reason for name, figure in derived.items() if figure.reason},
    )


def _divide(dividend: Quantity, divisor: Quantity, *, times: float = 1.0) -> Quantity:
    """Divide two figures; an unknown one gives its reason."""
    if dividend.value is None or divisor.value is None:
        return Quantity(None, "; ".join(filter(None, (dividend.reason, divisor.reason))))
    return Quantity(dividend.value * times / divisor.value)
