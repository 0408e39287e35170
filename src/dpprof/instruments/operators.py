"""Times the operators of training steps on this machine.

The experiments are traced under fake tensors. Each operator is called again with tensors of the
same shapes, strides and dtypes; one that two steps share is timed once.
"""

import time
from pathlib import Path

import torch

from dpprof.devices.selection import open_device
from dpprof.instruments.beside_operators import time_beside_operators
from dpprof.instruments.operator_timer import ROUNDS, OperatorTimer, list_ops
from dpprof.records.operators import OperatorTable
from dpprof.spec.experiment import Experiment, read_spec
from dpprof.spec.registry import UnsupportedError
from dpprof.system.hardware import available_cores


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
