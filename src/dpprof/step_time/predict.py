"""Predicts the time of a recorded step on a device."""

from collections.abc import Iterable

from dpprof.memory.recorder import Op
from dpprof.records.result import PredictedTime
from dpprof.spec.target import Dtype, Target
from dpprof.step_time.gpu_model import CLOCKS, GpuModel
from dpprof.step_time.timeline import IssuedOp, combine

_UPDATE = ("noise", "step")
"""The phases that run once, however many batches a gradient is accumulated over."""


def predict_step(ops: Iterable[Op], dtype: Dtype, target: Target) -> PredictedTime:
    """Predict how long a step takes on a GPU.

    Args:
        ops: The operators of a step in the steady state, in order.
        dtype: The dtype of the experiment.
        target: The GPU.

    Raises:
        NoPeakError: The peak of a dtype that the step multiplies in is not known.
    """
    model = GpuModel(target, dtype)
    issued, before_update = [], []
    for op in ops:
        moved = sum(size for _, size in (*op.reads, *op.writes))
        issued.append(IssuedOp(op.op_kind, model.predict(op.cost, moved)))
        if op.phase not in _UPDATE:
            before_update.append(issued[-1])
    step = combine(issued, model.host.share, model.host.spread, CLOCKS)
    rest = combine(before_update, model.host.share, model.host.spread, CLOCKS)
    return PredictedTime(
        median=step.median_s,
        low=step.low_s,
        high=step.high_s,
        without_update=rest.median_s,
        rests_on=step.rests_on,
        waiting_share=step.host_share,
    )
