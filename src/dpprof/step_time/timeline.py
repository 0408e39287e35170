"""The time of a step from the times of its operators.

The host issues one operator after another, and a GPU runs each as soon as it was issued and the one
before it has ended. So a step of many small operators takes the host's time, and one of large
operators the device's. A processor does both in turn. Errors of operators of one kind that rest on
the same are taken to be one error; errors of different kinds to be independent.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dpprof.records.terms import BASES, Basis
from dpprof.step_time.op_time import Z_90, OpTime


class IssuedOp(NamedTuple):
    """The predicted time of an operator on the device, and its kind."""

    kind: str
    time: OpTime


class StepTime(NamedTuple):
    """The predicted seconds of a step, with a 90 % interval."""

    median_s: float
    low_s: float
    high_s: float
    rests_on: dict[Basis, float]
    """Shares of the device's time."""

    host_share: float
    """The share of the step in which the device waits for the host."""


def combine(
    ops: Sequence[IssuedOp],
    host_s: float,
    host_spread: float,
    common_spread: float,
    *,
    on_host: bool = False,
) -> StepTime:
    """Predict a step of operators in the order in which they run.

    Args:
        ops: The operators.
        host_s: Seconds of the host for each.
        host_spread: Standard deviation of its logarithm.
        common_spread: Of all times of the device together.
        on_host: Whether the host runs the operators itself, one after another.
    """
    by_kind: dict[tuple[str, Basis], float] = defaultdict(float)
    weighted: dict[tuple[str, Basis], float] = defaultdict(float)
    for op in ops:
        key = op.kind, op.time.basis
        by_kind[key] += op.time.seconds
        weighted[key] += op.time.seconds * op.time.spread
    device_s = math.fsum(by_kind.values())
    errors = [*weighted.values(), common_spread * device_s]
    spread = math.hypot(*errors) / device_s if device_s else 0.0
    seconds = [op.time.seconds for op in ops]

    def run(sigmas: float) -> float:
        slower = math.exp(sigmas * spread)
        issuing_s = host_s * math.exp(sigmas * host_spread)
        if on_host:
            return slower * device_s + issuing_s * len(ops)
        return _overlap(seconds, slower, issuing_s)

    median_s = run(0)
    rests_on = {
        basis: math.fsum(s for (_, of), s in by_kind.items() if of == basis) / device_s
        for basis in BASES
        if any(of == basis for _, of in by_kind)
    }
    waiting = 1 - device_s / median_s if median_s else 0.0
    return StepTime(median_s, run(-Z_90), run(Z_90), rests_on, max(waiting, 0.0))


def _overlap(seconds: Sequence[float], slower: float, host_s: float) -> float:
    """Return when the last operator ends, if each waits to be issued and for the one before it."""
    issued = ended = 0.0
    for each in seconds:
        issued += host_s
        ended = max(ended, issued) + slower * each
    return ended
