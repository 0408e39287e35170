"""Times operators of training steps one by one, in rounds, because a machine's speed drifts.

An operator takes the median of its rounds.
"""

import gc
import math
import operator
import statistics

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.operators import OperatorShape, OperatorTime
from dpprof.experiments.records.terms import Phase
from dpprof.measure.devices.device import Device
from dpprof.measure.instruments.replay import Replayer
from dpprof.predict.estimate import trace_steps
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.operator_shape import shape_of

ROUNDS = 5


def ignore(_phase: Phase) -> None:
    """Do nothing as a phase begins."""


def list_ops(experiment: Experiment) -> list[Op]:
    """Return the operators of an experiment's step in the steady state, in order."""
    ops = list(trace_steps(experiment, ignore).steady.ops)
    gc.collect()
    return ops


class OperatorTimer:
    """Collects the times of operators, round by round.

    With ``small_steps`` the data of their steps stay in a cache.
    """

    def __init__(self, device: Device, *, small_steps: bool = False) -> None:
        self._replayer = Replayer(device, small_steps=small_steps)
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
            self._seconds.setdefault(call, []).append(self._replayer.time(call))
        except (RuntimeError, AttributeError, IndexError, TypeError, ValueError) as error:
            shape = self._shapes[call]
            self.failed[shape.call] = f"{shape.op}: {type(error).__name__}: {error}"[:300]
            del self._seconds[call]

    def sum_up(self, ops: list[Op]) -> float:
        """Return the seconds of all operators that were timed."""
        timed = (self._seconds.get(op.call) for op in ops)
        return math.fsum(statistics.median(some) for some in timed if some is not None)

    def tabulate(self) -> tuple[list[OperatorTime], float | None]:
        """Return the operators, and the drift between rounds; None after one round.

        The typical operator of a round decides how much slower the round is than others.
        """
        medians = {call: statistics.median(some) for call, some in self._seconds.items()}
        slower = {
            call: [math.log(seconds / medians[call]) for seconds in some]
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
