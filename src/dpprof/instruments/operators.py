"""Times the operators of training steps one by one, on this machine.

The experiments are traced under fake tensors. Each operator is called again with tensors of the
same shapes, strides and dtypes; one that two steps share is timed once. All are timed in several
rounds, because a machine's speed drifts: an operator takes the median of its rounds.
"""

import gc
import math
import operator
import statistics
import time
from pathlib import Path

import torch

from dpprof.devices.device import Device
from dpprof.devices.selection import open_device
from dpprof.instruments.clean import time_steps
from dpprof.instruments.memory import trace_steps
from dpprof.instruments.setup import begin, set_up
from dpprof.memory.recorder import Op
from dpprof.records.operators import OperatorShape, OperatorTable, OperatorTime
from dpprof.records.terms import Phase
from dpprof.spec.experiment import Experiment, read_spec
from dpprof.spec.registry import UnsupportedError
from dpprof.step_time.operator_shape import shape_of
from dpprof.step_time.replay import Replayer
from dpprof.system.hardware import available_cores

ROUNDS = 5
CALL_S = 0.01
"""About how long all repeats of one call may take in one round."""

_LEAST_HOST_S = 1e-6
_SMALL = {"vocab_size": 64, "d_model": 16, "layers": 4, "heads": 2}
_HOST_METHODS = ("standard", "flash-bk", "opacus-hooks")


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
    """

    def __init__(self, device: Device) -> None:
        self._replayer = Replayer(device, CALL_S)
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
        known = (self._seconds.get(op.call) for op in ops)
        return math.fsum(statistics.median(some) for some in known if some is not None)

    def tabulate(self) -> tuple[list[OperatorTime], float | None]:
        """Return the operators, and the drift between rounds, None after one.

        A round is as much slower than others as its typical operator.
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
    host_s, host_spread = time_hosts(timer)
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
        host_s=host_s,
        host_spread=host_spread,
        experiments=done,
        left_out=left_out | timer.failed,
        wall_s=time.monotonic() - start,
    )


def threads_of(experiment: Experiment) -> int:
    """Return how many threads an experiment computes on: all cores, where it does not say."""
    return experiment.cpu_threads or available_cores()


def time_hosts(timer: OperatorTimer) -> tuple[float, float]:
    """Return what a step takes besides its operators, for each, and the spread of its logarithm."""
    host = [_time_host(timer, method) for method in _HOST_METHODS]
    median_s = statistics.median(host)
    return median_s, statistics.pstdev(math.log(one / median_s) for one in host)


def _time_host(timer: OperatorTimer, name: str) -> float:
    """Return what a step of a model that computes nearly nothing takes besides its operators."""
    experiment = Experiment.model_validate(
        {"model": _SMALL, "method": name, "batch_size": 2, "seq_len": 8, "device": "cpu"}
    )
    ops = list_ops(experiment)
    timer.add(ops)
    method, device = begin(experiment)
    training = set_up(experiment, method, device, lambda *_: None)
    steps = time_steps(device, 20, lambda: training.step.run(training.batch, ignore))
    rest_s = statistics.median(steps[5:]) - timer.sum_up(ops)
    return max(rest_s / len(ops), _LEAST_HOST_S)
