"""What a training step takes besides its operators as they were timed one by one.

The host takes time for each: Python, hooks and autograd. Models that compute nearly nothing show
it. And an operator takes longer in a step of a real size than alone: the memory that it writes
comes fresh from the system, page by page, and caches hold other data. One such step shows by how
much.
"""

import math
import statistics
from typing import Any, NamedTuple

from dpprof.instruments.clean import time_steps
from dpprof.instruments.operator_timer import ROUNDS, OperatorTimer, ignore, list_ops
from dpprof.instruments.setup import begin, set_up
from dpprof.memory.events import Op
from dpprof.spec.experiment import Experiment

_TINY = {
    "model": {"vocab_size": 64, "d_model": 16, "layers": 4, "heads": 2},
    "batch_size": 2,
    "seq_len": 8,
}
_TINY_METHODS = ("standard", "flash-bk", "opacus-hooks")
_REAL = {"model": "small", "batch_size": 4, "seq_len": 256, "method": "standard"}
_LEAST_HOST_S = 1e-6
_WARM_UP = 2


class BesideOperators(NamedTuple):
    """What a step takes besides its operators."""

    host_s: float
    """Seconds of the host for each operator."""

    host_spread: float
    """Standard deviation of its logarithm."""

    step_factor: float
    """How many times as long operators take in a step as alone."""


class MeasuredStep:
    """A step on the CPU that is measured beside its operators.

    Args:
        experiment: Whose step it is.
        ops: Its operators.
        small: Whether its data stay in a cache.
    """

    def __init__(self, experiment: Experiment, ops: list[Op], *, small: bool = False) -> None:
        method, self._device = begin(experiment)
        self._training = set_up(experiment, method, self._device, lambda *_: None)
        self._ops = ops
        self.timer = OperatorTimer(self._device, small_steps=small)
        self._run(_WARM_UP)

    def time(self, steps: int) -> list[float]:
        """Return the seconds of steps, some of which are run after each round of the operators."""
        self.timer.add(self._ops)
        step_s = self._run(steps)
        for _ in range(ROUNDS - 1):
            self.timer.repeat()
            step_s += self._run(steps)
        return step_s

    def _run(self, steps: int) -> list[float]:
        training = self._training
        return time_steps(self._device, steps, lambda: training.step.run(training.batch, ignore))


def time_beside_operators() -> BesideOperators:
    """Measure it on this machine, on as many threads as PyTorch has."""
    host = []
    for method in _TINY_METHODS:
        step_s, operators_s, ops = _compare(_TINY | {"method": method}, 4, small=True)
        host.append(max((step_s - operators_s) / ops, _LEAST_HOST_S))
    host_s = statistics.median(host)
    step_s, operators_s, ops = _compare(_REAL, 1)
    return BesideOperators(
        host_s=host_s,
        host_spread=statistics.pstdev(math.log(one / host_s) for one in host),
        step_factor=(step_s - host_s * ops) / operators_s,
    )


def _compare(axes: dict[str, Any], steps: int, *, small: bool = False) -> tuple[float, float, int]:
    """Return the seconds of a step, those of its operators together, and their number."""
    experiment = Experiment.model_validate(axes | {"device": "cpu"})
    ops = list_ops(experiment)
    measured = MeasuredStep(experiment, ops, small=small)
    step_s = statistics.median(measured.time(steps))
    return step_s, measured.timer.sum_up(ops), len(ops)
