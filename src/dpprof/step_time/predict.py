"""Predicts the time of a recorded step on a device from the times of its operators.

The host issues one operator after another, and a GPU runs each as soon as it was issued and the one
before it has ended. So a step of many small operators takes the host's time, and one of large
operators the device's. A CUDA graph issues all at once. A processor does both in turn. Errors of
operators of one kind that rest on the same data are taken to be one error; errors of different
kinds to be independent.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dpprof.memory.events import Op
from dpprof.records.record import ResultError
from dpprof.records.result import PredictedTime, Time
from dpprof.records.terms import BASES, Basis
from dpprof.spec.experiment import Experiment
from dpprof.spec.target import Dtype, Target
from dpprof.step_time.gpu_model import NO_HOST, GpuModel
from dpprof.step_time.op_time import Z_90, OpTime, UnknownTimeError
from dpprof.step_time.operator_shape import moved_bytes, shape_of
from dpprof.step_time.own_table import OwnTable, read_own_table


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
    ops: Sequence[tuple[str, OpTime]],
    host_s: float,
    host_spread: float,
    common_spread: float,
    *,
    on_host: bool = False,
) -> StepTime:
    """Predict a step of operators in the order in which they run.

    Args:
        ops: The kind of each operator, and its predicted time on the device.
        host_s: Seconds of the host for each.
        host_spread: Standard deviation of the logarithm of ``host_s``.
        common_spread: Standard deviation of the logarithm of all times of the device together.
        on_host: Whether the host runs the operators itself, one after another.
    """
    by_kind: dict[tuple[str, Basis], float] = defaultdict(float)
    weighted: dict[tuple[str, Basis], float] = defaultdict(float)
    for kind, time in ops:
        key = kind, time.basis
        by_kind[key] += time.seconds
        weighted[key] += time.seconds * time.spread
    device_s = math.fsum(by_kind.values())
    errors = [*weighted.values(), common_spread * device_s]
    spread = math.hypot(*errors) / device_s if device_s else 0.0
    seconds = [time.seconds for _, time in ops]

    def run(sigmas: float) -> float:
        slower = math.exp(sigmas * spread)
        issuing_s = host_s * math.exp(sigmas * host_spread)
        if on_host:
            return slower * device_s + issuing_s * len(ops)
        issued = ended = 0.0
        for each in seconds:  # waits to be issued, and for the one before it
            issued += issuing_s
            ended = max(ended, issued) + slower * each
        return ended

    median_s = run(0)
    rests_on = {
        basis: math.fsum(s for (_, of), s in by_kind.items() if of == basis) / device_s
        for basis in BASES
        if any(of == basis for _, of in by_kind)
    }
    waiting = 1 - device_s / median_s if median_s else 0.0
    return StepTime(median_s, run(-Z_90), run(Z_90), rests_on, max(waiting, 0.0))


DRIFT = 0.05
"""Least spread of all times of a machine together: its load and temperature change."""

_UPDATE = ("noise", "step")
"""The phases that run once, however many batches a gradient is accumulated over."""


def predict_time(
    ops: Sequence[Op], experiment: Experiment, target: Target | None
) -> tuple[Time | None, dict[str, str]]:
    """Predict how long a step takes, as a result states it.

    Args:
        ops: The operators of a step in the steady state, in order.
        experiment: Whose step it is.
        target: A GPU; None for this machine's processor.

    Returns:
        The time, or None if it is not predicted; and reasons for each figure that is missing.
    """
    if experiment.parallel is not None:
        return None, {"time": "how long ranks take to communicate is not predicted"}
    try:
        if target is None:
            step = predict_step_here(ops, read_own_table(Path.cwd(), experiment.cpu_threads))
        else:
            is_graph = experiment.execution == "graph"
            step = predict_step(ops, experiment.dtype, target, is_graph=is_graph)
    except (UnknownTimeError, ResultError) as error:
        return None, {"time": f"not predicted: {error}"}
    time = Time(step_s=[], predicted_step_s=step)
    return time, {"time.median_s": "nothing ran; the instrument clean measures it"}


def predict_step(
    ops: Sequence[Op], dtype: Dtype, target: Target, *, is_graph: bool = False
) -> PredictedTime:
    """Predict how long a step takes on a GPU.

    Args:
        ops: The operators of a step in the steady state, in order.
        dtype: The dtype of the experiment.
        target: The GPU.
        is_graph: Whether a CUDA graph starts the kernels, so that no kernel waits for the host.

    Raises:
        UnknownTimeError: The peak of a dtype that the step multiplies in is not known.
    """
    model = GpuModel(target, dtype)
    times = [model.predict(op.cost, moved_bytes(op)) for op in ops]
    host = NO_HOST if is_graph else model.host
    run = partial(combine, host_s=host.value, host_spread=host.spread, common_spread=model.clocks)
    return _state(ops, times, run)


def predict_step_here(ops: Sequence[Op], table: OwnTable) -> PredictedTime:
    """Predict how long a step takes on this machine's processor.

    The speed of the machine may have changed since, by as much as between rounds of timing.

    Args:
        ops: The operators of a step in the steady state, in order.
        table: Operators that were timed here.
    """
    distinct = {op.call: op for op in ops}
    found = {call: table.predict(shape_of(op)) for call, op in distinct.items()}
    times = [
        time._replace(seconds=time.seconds * table.step_factor)
        for time in (found[op.call] for op in ops)
    ]
    run = partial(
        combine,
        host_s=table.host_s,
        host_spread=table.host_spread,
        common_spread=math.hypot(DRIFT, table.drift),
        on_host=True,
    )
    return _state(ops, times, run)


def _state(
    ops: Sequence[Op],
    times: Sequence[OpTime],
    run: Callable[[Sequence[tuple[str, OpTime]]], StepTime],
) -> PredictedTime:
    issued = [(op.op_kind, time) for op, time in zip(ops, times, strict=True)]
    step = run(issued)
    rest = run([one for op, one in zip(ops, issued, strict=True) if op.phase not in _UPDATE])
    return PredictedTime(
        median=step.median_s,
        low=step.low_s,
        high=step.high_s,
        rests_on=step.rests_on,
        waiting_share=step.host_share,
        without_update=rest.median_s,
    )
