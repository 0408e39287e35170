"""Times the operators of training steps on this machine, and the time that a step adds to them.

The experiments are traced under fake tensors. Each operator is called again with tensors of the
same shapes, strides and dtypes; one that two steps share is timed once.

The host takes time for each operator: Python, hooks and autograd. Models that compute nearly
nothing show how much. An operator also takes longer in a step of a real size than alone: the system
gives the memory that it writes page by page, and caches hold other data. One such step shows how
much longer.
"""

import gc
import math
import operator
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpprof.experiments.config.experiment import Experiment, read_spec
from dpprof.experiments.records.ceilings import OperatorShape, OperatorTable, OperatorTime
from dpprof.measure.devices.device import Device
from dpprof.measure.devices.selection import open_device
from dpprof.measure.instruments.opening import open_experiment
from dpprof.measure.instruments.replay import Replayer
from dpprof.predict.estimate import trace_steps
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.own_table import shape_of
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.setup import set_up
from dpprof.system.hardware import available_cores

ROUNDS = 5


def list_ops(experiment: Experiment) -> list[Op]:
    """Return the operators of an experiment's step in the steady state, in order."""
    ops = list(trace_steps(experiment, lambda _: None).steady.ops)
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
    """The time of a step that its operators alone do not take."""

    host_s: float  # seconds of the host for each operator
    host_spread: float  # standard deviation of its logarithm
    step_factor: float  # time of operators in a step over their time alone


def time_in_turn(
    experiment: Experiment, ops: list[Op], steps: int, *, small: bool = False
) -> tuple[list[float], OperatorTimer]:
    """Time a step on the CPU and its operators in turn; return each step's seconds, and these.

    ``steps`` steps run after each round of the operators; ``small`` says whether their data stay in
    a cache.
    """
    method, device = open_experiment(experiment)
    training = set_up(experiment, method, device.torch_device, lambda *_: None)
    timer = OperatorTimer(device, small_steps=small)

    def run(count: int) -> list[float]:
        return device.time(lambda: training.step.run(training.batch, lambda _: None), count)

    run(_WARM_UP)
    timer.add(ops)
    step_s = run(steps)
    for _ in range(ROUNDS - 1):
        timer.repeat()
        step_s += run(steps)
    return step_s, timer


def time_beside_operators() -> BesideOperators:
    """Measure a step's own time on this machine, on all threads that PyTorch has."""
    host = []
    for method in _TINY_METHODS:
        step_s, operators_s, ops = _compare(_TINY | {"method": method}, 4, small=True)
        host.append(max((step_s - operators_s) / ops, _LEAST_HOST_S))
    host_s = statistics.median(host)
    step_s, operators_s, ops = _compare(_REAL, 1)
    return BesideOperators(
        host_s=host_s,
        host_spread=statistics.pstdev(math.log(seconds / host_s) for seconds in host),
        step_factor=(step_s - host_s * ops) / operators_s,
    )


def _compare(axes: dict[str, Any], steps: int, *, small: bool = False) -> tuple[float, float, int]:
    """Return the seconds of a step, those of its operators together, and their number."""
    experiment = Experiment.model_validate(axes | {"device": "cpu"})
    ops = list_ops(experiment)
    step_s, timer = time_in_turn(experiment, ops, steps, small=small)
    return statistics.median(step_s), timer.sum_up(ops), len(ops)


def measure(budget_s: int, *specs: str) -> OperatorTable:
    """Time the operators of experiments on the CPU, on as many threads as the first one has.

    Args:
        budget_s: About how long it may take. The first round takes experiments until half of it is
            used up, and leaves the rest of them out; further rounds follow while there is time.
        specs: Files of the experiments, the most important first.
    """
    start = time.monotonic()
    experiments = [read_spec(Path(spec)) for spec in specs]
    threads = threads_of(experiments[0])
    torch.set_num_threads(threads)
    timer = OperatorTimer(open_device("cpu"))
    beside = time_beside_operators()
    done, left_out = [], {}
    for experiment in experiments:
        if threads_of(experiment) != threads:
            left_out[experiment.id] = f"operators are timed on {threads} threads"
            continue
        if time.monotonic() - start > budget_s / 2:
            left_out[experiment.id] = f"half of the budget of {budget_s} s was used up"
            continue
        try:
            timer.add(list_ops(experiment))
        except UnsupportedError as error:
            left_out[experiment.id] = str(error)
        else:
            done.append(experiment.id)
    rounds, round_s = 1, 0.0
    while rounds < ROUNDS and time.monotonic() - start + round_s < budget_s:
        round_start = time.monotonic()
        timer.repeat()
        round_s = time.monotonic() - round_start
        rounds += 1
    operators, drift = timer.tabulate()
    return OperatorTable(
        operators=operators,
        threads=threads,
        rounds=rounds,
        drift=drift,
        **beside._asdict(),
        experiments=done,
        left_out=left_out | timer.failed,
        wall_s=time.monotonic() - start,
    )


def threads_of(experiment: Experiment) -> int:
    """Return how many threads an experiment computes on: all cores, where it does not say."""
    return experiment.cpu_threads or available_cores()
