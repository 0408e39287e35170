"""What is known of a stretch of training: its times, throughput and use of the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

NAMES = {
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
"""The attribute of ``Metrics`` that each name stands for, in the order of writing."""


@dataclass
class Window:
    """Steps that followed one another."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def add(self, samples: int, tokens: int) -> None:
        """Add a step, of as many samples and tokens as its batch really had."""
        self.steps += 1
        self.samples += samples
        self.tokens += tokens


class Figure(NamedTuple):
    """A number, or None with the reason why it is not known."""

    value: float | None
    reason: str = ""


class Work(NamedTuple):
    """What a token takes, and what the device can do."""

    model_flops_per_token: Figure
    executed_flops_per_token: Figure
    peak_flops_per_s: Figure


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What was measured last. A figure is None where it is not known, and ``reasons`` says why."""

    measured_at_step: int
    """The profiled step with which these were measured."""

    carried: bool
    """Whether that is an earlier step than the last."""

    includes_profiling: bool
    """Whether the steps timed were profiled ones, which are slower."""

    step_time_s: float
    """Mean over the steps timed, what happened between them included."""

    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs, those of the non-private step, over elapsed time and the device's peak."""

    hfu: float | None
    """Executed FLOPs over the same: work that a method adds counts as use."""

    dp_flop_multiplier: float | None
    """Executed over model FLOPs."""

    reasons: Mapping[str, str]
    """Why a figure is not known, by the name under which it would be written."""

    @property
    def mfu_percent(self) -> float | None:
        """``mfu`` in percent."""
        return None if self.mfu is None else 100 * self.mfu

    @property
    def beyond_peak(self) -> bool:
        """Whether more was computed than the device can: some figure that was given is wrong."""
        return any(use is not None and use > 1 for use in (self.mfu, self.hfu))

    @cached_property
    def scalars(self) -> Mapping[str, float]:
        """What is known, by the names under which it is written."""
        known = {name: getattr(self, attribute) for name, attribute in NAMES.items()}
        return {name: float(value) for name, value in known.items() if value is not None}


def derive_metrics(
    window: Window, elapsed_s: float, work: Work, *, step: int, includes_profiling: bool
) -> Metrics:
    """Work out what was measured.

    Args:
        window: The steps timed, at least one.
        elapsed_s: How long they took together, in seconds.
        work: What a token of theirs takes.
        step: The profiled step with which it was measured.
        includes_profiling: Whether the steps timed were profiled ones.
    """
    model, executed, peak = work
    tokens_per_s = window.tokens / elapsed_s
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
        step_time_s=elapsed_s / window.steps,
        steps_per_s=window.steps / elapsed_s,
        samples_per_s=window.samples / elapsed_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu.value,
        hfu=hfu.value,
        dp_flop_multiplier=multiplier.value,
        reasons={name: figure.reason for name, figure in derived.items() if figure.reason},
    )


def _divide(one: Figure, other: Figure, *, times: float = 1.0) -> Figure:
    """Divide what is known; what is not leaves its reason."""
    if one.value is None or other.value is None:
        return Figure(None, "; ".join(filter(None, (one.reason, other.reason))))
    return Figure(one.value * times / other.value)
