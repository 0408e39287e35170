"""Times the operators of training steps one by one, on this machine.

The experiments are traced under fake tensors. Each operator is called again with tensors of the
same shapes, strides and dtypes; one that two steps share is timed once.
"""

import gc
import math
import statistics
import time
from pathlib import Path

from dpprof.devices.device import Device
from dpprof.devices.selection import open_device
from dpprof.instruments.clean import time_steps
from dpprof.instruments.memory import trace_steps
from dpprof.instruments.setup import begin, set_up
from dpprof.memory.recorder import Op
from dpprof.records.operators import OperatorTable, OperatorTime
from dpprof.records.terms import Phase
from dpprof.spec.experiment import Experiment, read_spec
from dpprof.spec.registry import UnsupportedError
from dpprof.step_time.own_table import digest_call
from dpprof.step_time.predict import moved_bytes
from dpprof.step_time.replay import Replayer

CALL_S = 0.03
"""About how long all repeats of one call may take."""

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
    """Collects the times of operators.

    Args:
        device: Where they run.
    """

    def __init__(self, device: Device) -> None:
        self._replayer = Replayer(device, CALL_S)
        self.times: dict[str, OperatorTime] = {}
        self.failed: dict[str, str] = {}

    def time(self, ops: list[Op]) -> None:
        """Time the operators that were not timed yet."""
        for op in ops:
            key = digest_call(op.call)
            if key in self.times or key in self.failed:
                continue
            try:
                found = self._replayer.time(op.call)
            except (RuntimeError, AttributeError, IndexError, TypeError, ValueError) as error:
                self.failed[key] = f"{op.cost.op}: {type(error).__name__}: {error}"[:300]
                continue
            self.times[key] = OperatorTime(
                op=op.cost.op,
                call=key,
                family=op.cost.family,
                dtype=op.cost.dtype,
                flops=op.cost.flops,
                moved_bytes=moved_bytes(op),
                product=op.cost.product,
                seconds=found.median_s,
                spread=found.spread,
            )

    def sum_up(self, ops: list[Op]) -> float:
        """Return the seconds of all operators that were timed."""
        known = (self.times.get(digest_call(op.call)) for op in ops)
        return math.fsum(one.seconds for one in known if one is not None)


def measure(budget_s: int, *specs: str) -> OperatorTable:
    """Time the operators of experiments on the CPU.

    Args:
        budget_s: About how long it may take; experiments for which no time is left are left out.
        specs: Files of the experiments, the most important first.
    """
    start = time.monotonic()
    timer = OperatorTimer(open_device("cpu"))
    host_s, host_spread = time_hosts(timer)
    done, left_out = [], {}
    for experiment in map(read_spec, map(Path, specs)):
        if time.monotonic() - start > budget_s:
            left_out[experiment.id] = f"the budget of {budget_s} s was used up"
            continue
        try:
            timer.time(list_ops(experiment))
        except UnsupportedError as error:
            left_out[experiment.id] = str(error)
        else:
            done.append(experiment.id)
    return OperatorTable(
        operators=list(timer.times.values()),
        host_s=host_s,
        host_spread=host_spread,
        experiments=done,
        left_out=left_out | timer.failed,
        wall_s=time.monotonic() - start,
    )


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
    timer.time(ops)
    method, device = begin(experiment)
    training = set_up(experiment, method, device, lambda *_: None)
    steps = time_steps(device, 20, lambda: training.step.run(training.batch, ignore))
    rest_s = statistics.median(steps[5:]) - timer.sum_up(ops)
    return max(rest_s / len(ops), _LEAST_HOST_S)
