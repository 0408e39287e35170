"""Times operators of training steps one by one, in rounds, because a machine's speed drifts.

Each operator's call is made again with other elements. An operator takes the median of its rounds.
"""

import gc
import math
import operator
import statistics

import torch
from torch import Tensor

from dpprof.devices.device import Device, time_repeats
from dpprof.flops.op_call import Layout, read_call
from dpprof.instruments.memory import trace_steps
from dpprof.memory.events import Op
from dpprof.records.operators import OperatorShape, OperatorTime
from dpprof.records.terms import Phase
from dpprof.spec.experiment import Experiment
from dpprof.step_time.operator_shape import shape_of

ROUNDS = 5
CALL_S = 0.01
"""About how long all repeats of one call may take in one round."""

_MOST_REPEATS = 8
_NOISE = 2**22
"""Random numbers that tensors are filled from, again and again.

They are around 1: square roots of negative numbers and products of denormal numbers take up to 20
times as long as others.
"""

_OTHER_DATA = 2**21
"""Numbers that are touched before each call, twice a common second-level cache: in a step too, an
operator's arguments are rarely the last data that were used."""


def ignore(_phase: Phase) -> None:
    """Do nothing as a phase begins."""


def list_ops(experiment: Experiment) -> list[Op]:
    """Return the operators of an experiment's step in the steady state, in order."""
    ops = list(trace_steps(experiment, ignore).steady.ops)
    gc.collect()
    return ops


class OperatorTimer:
    """Collects the times of operators, round by round.

    Args:
        device: Where they run.
        small_steps: Whether the data of their steps stay in a cache.
    """

    def __init__(self, device: Device, *, small_steps: bool = False) -> None:
        self._device = device
        self._noise = 0.5 + torch.rand(_NOISE, device=device.torch_device)
        touched = 0 if small_steps else _OTHER_DATA
        self._other_data = torch.ones(touched, device=device.torch_device)
        self._shapes: dict[str, OperatorShape] = {}
        self._seconds: dict[str, list[float]] = {}
        self.failed: dict[str, str] = {}

    def add(self, ops: list[Op]) -> None:
        """Time the operators that were not timed yet."""
        for call, op in {op.call: op for op in ops}.items():
            if call not in self._shapes:
                self._shapes[call] = shape_of(op)
                self._time(call)

    def repeat(self) -> None:
        """Time all operators once more."""
        for call in list(self._seconds):
            self._time(call)

    def _time(self, call: str) -> None:
        try:
            self._seconds.setdefault(call, []).append(self.replay(call))
        except (RuntimeError, AttributeError, IndexError, TypeError, ValueError) as error:
            shape = self._shapes[call]
            self.failed[shape.call] = f"{shape.op}: {type(error).__name__}: {error}"[:300]
            del self._seconds[call]

    def replay(self, call: str) -> float:
        """Return the median seconds of a call from Python, after one to warm up.

        Raises:
            RuntimeError: The operator refuses the arguments, or they do not fit in memory.
            AttributeError: This PyTorch has no such operator.
        """
        function, args, kwargs = read_call(call, self.make, self._device.torch_device)

        def time_calls(repeats: int) -> list[float]:
            self._device.synchronize()
            marks = []
            for _ in range(repeats):
                self._other_data.add_(1)
                marks.append(self._device.mark())
                function(*args, **kwargs)
                marks.append(self._device.mark())
            return self._device.durations_s(marks)[::2]

        return statistics.median(time_repeats(time_calls, CALL_S, _MOST_REPEATS))

    def make(self, layout: Layout) -> Tensor:
        """Make a tensor of a layout, with random elements."""
        shape, strides, dtype, bound = layout
        spans = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        count = 0 if 0 in shape else 1 + sum(spans)
        flat = torch.empty(count, dtype=dtype, device=self._device.torch_device)
        if dtype.is_floating_point:
            for start in range(0, count, _NOISE):
                part = flat[start : start + _NOISE]
                part.copy_(self._noise[: len(part)])
        else:
            flat.random_(0, max(bound, 1))
        return flat.as_strided(shape, strides)

    def sum_up(self, ops: list[Op]) -> float:
        """Return the seconds of all operators that were timed."""
        known = (self._seconds.get(op.call) for op in ops)
        return math.fsum(statistics.median(some) for some in known if some is not None)

    def tabulate(self) -> tuple[list[OperatorTime], float | None]:
        """Return the operators, and the drift between rounds; None after one round.

        The typical operator of a round decides how much slower the round is than others.
        """
        medians = {call: statistics.median(some) for call, some in self._seconds.items()}
        slower = {
            call: [math.log(one / medians[call]) for one in some]
            for call, some in self._seconds.items()
        }
        rounds = [statistics.median(some) for some in zip(*slower.values(), strict=True)]
        operators = [
            OperatorTime(
                **self._shapes[call].model_dump(),
                seconds=medians[call],
                spread=statistics.pstdev(map(operator.sub, some, rounds)),
            )
            for call, some in slower.items()
        ]
        return operators, statistics.stdev(rounds) if len(rounds) > 1 else None
