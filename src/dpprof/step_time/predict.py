"""Predicts the time of a recorded step on a device."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dpprof.memory.events import Op
from dpprof.records.record import ResultError
from dpprof.records.result import PredictedTime, Time
from dpprof.spec.experiment import Experiment
from dpprof.spec.target import Dtype, Target
from dpprof.step_time.gpu_model import CLOCKS, GpuModel, NoPeakError
from dpprof.step_time.op_time import OpTime
from dpprof.step_time.operator_shape import moved_bytes, shape_of
from dpprof.step_time.own_table import NoTableError, OwnTable, read_own_table
from dpprof.step_time.timeline import IssuedOp, StepTime, combine

DRIFT = 0.05
"""Least spread of all times of a machine together: it is not as busy, or as warm, as it was."""

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
        The time, None where it is not predicted; and why what it lacks is unknown.
    """
    if experiment.parallel is not None:
        return None, {"time": "how long ranks take to communicate is not predicted"}
    try:
        step = _predict(ops, experiment, target)
    except (NoPeakError, NoTableError, ResultError) as error:
        return None, {"time": f"not predicted: {error}"}
    time = Time(step_s=[], predicted_step_s=step)
    return time, {"time.median_s": "nothing ran; the instrument clean measures it"}


def _predict(ops: Sequence[Op], experiment: Experiment, target: Target | None) -> PredictedTime:
    if target is not None:
        return predict_step(ops, experiment.dtype, target)
    return predict_step_here(ops, read_own_table(Path.cwd(), experiment.cpu_threads))


def predict_step(ops: Sequence[Op], dtype: Dtype, target: Target) -> PredictedTime:
    """Predict how long a step takes on a GPU.

    Args:
        ops: The operators of a step in the steady state, in order.
        dtype: The dtype of the experiment.
        target: The GPU.

    Raises:
        NoPeakError: The peak of a dtype that the step multiplies in is not known.
    """
    model = GpuModel(target, dtype)
    times = [model.predict(op.cost, moved_bytes(op)) for op in ops]
    run = partial(
        combine, host_s=model.host.share, host_spread=model.host.spread, common_spread=CLOCKS
    )
    return _state(ops, times, run)


def predict_step_here(ops: Sequence[Op], table: OwnTable) -> PredictedTime:
    """Predict how long a step takes on this machine's processor.

    The machine may be as much faster or slower now as it was between rounds of timing.

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
    ops: Sequence[Op], times: Sequence[OpTime], run: Callable[[Sequence[IssuedOp]], StepTime]
) -> PredictedTime:
    issued = [IssuedOp(op.op_kind, time) for op, time in zip(ops, times, strict=True)]
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
