"""Predicts the time of a recorded step on a device from the times of its operators.

The host issues one operator after another, and a GPU runs each as soon as it was issued and the one
before it in its stream has ended. So a step of many small operators takes the host's time, and one
of large operators the device's. A CUDA graph issues all at once. A processor does both in turn.
Several ranks have a stream of collectives beside the stream that computes, and an operator also
waits for what it needs of the other stream (``dpprof.predict.memory.exchanges``). While a
collective runs, it takes processors from the kernels beside it. Errors of operators of one kind
that rest on the same data are taken to be one error; errors of different kinds to be independent.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.parallel import Parallel
from dpprof.experiments.config.target import Dtype, Target
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import PredictedTime, Time
from dpprof.experiments.records.terms import BASES, Basis
from dpprof.predict.memory import exchanges
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.collective_time import CollectiveModel
from dpprof.predict.step_time.gpu_model import MEMORY, NO_HOST, GpuModel
from dpprof.predict.step_time.intervals import widen
from dpprof.predict.step_time.op_time import Z_90, OpTime, UnknownTimeError
from dpprof.predict.step_time.own_table import OwnTable, read_own_table, shape_of

CHANNELS = {"8.0": 24}
"""Multiprocessors that a collective inside a node takes, by compute capability: 24 rings on eight
A100 (NVIDIA/nccl-tests issue 100). No other kernel runs on them meanwhile (NVIDIA/nccl 1656)."""

_CHANNELS = 16
"""Multiprocessors that a collective takes on other devices: 16 rings on nodes of eight H100
(NVIDIA/nccl issue 1453)."""

AMONG_GPUS = 0.015
"""Spread of the speeds of equal GPUs, of which all wait for the slowest: about 8 % from one end to
the other (Sinha et al. 2022, "Not All GPUs Are Created Equal", SC22)."""


class Issued(NamedTuple):
    """An operator that the host issues."""

    kind: str
    time: OpTime  # the time on the device
    placed: exchanges.Placed = exchanges.Placed(exchanges.COMPUTE, (), None)


class StepTime(NamedTuple):
    """The predicted seconds of a step, by fields of ``PredictedTime``."""

    median: float
    low: float
    high: float
    rests_on: dict[Basis, float]
    waiting_share: float
    communication_share: float
    """The share of the step in which the device only waits for ranks, or runs collectives in
    line."""


class _Run(NamedTuple):
    """When operators of a step run, in seconds."""

    starts: list[float]
    ends: list[float]
    exposed_s: float  # how long the stream that computes waits for another one

    @property
    def step_s(self) -> float:
        return max(self.ends, default=0.0)


def _run(
    placed: Sequence[exchanges.Placed], seconds: Sequence[float], issuing_s: float, *, on_host: bool
) -> _Run:
    """Run operators, each after it was issued, the one before it, and those that it waits for."""
    starts: list[float] = []
    ends: list[float] = []
    free = [0.0] * exchanges.STREAMS
    issued = exposed_s = 0.0
    for (stream, waits, _), each in zip(placed, seconds, strict=True):
        issued += issuing_s
        start = max(free[stream], issued)
        for earlier in waits:
            if ends[earlier] > start:
                exposed_s += (ends[earlier] - start) * (stream == exchanges.COMPUTE)
                start = ends[earlier]
        end = start + each
        if on_host:
            issued = end
        free[stream] = end
        starts.append(start)
        ends.append(end)
    return _Run(starts, ends, exposed_s)


def combine(
    ops: Sequence[Issued],
    host_s: float,
    host_spread: float,
    common_spread: float,
    *,
    on_host: bool = False,
    lent: float = 0.0,
) -> StepTime:
    """Predict a step of operators in the order in which they are issued.

    Args:
        ops: The operators.
        host_s: Seconds of the host for each.
        host_spread: Standard deviation of the logarithm of ``host_s``.
        common_spread: Standard deviation of the logarithm of all times of the device together.
        on_host: Whether the host runs the operators itself, one after another.
        lent: The part of the device that a collective takes from kernels beside it.
    """
    placed = [op.placed for op in ops]
    seconds = _lend(placed, [op.time.seconds for op in ops], host_s, lent)

    def run(sigmas: float, of_collectives: float = 0.0) -> _Run:
        device, ranks = math.exp(sigmas * spread), math.exp(of_collectives * ranks_spread)
        each = [
            (ranks if where.collective else device) * kernel_s
            for kernel_s, where in zip(seconds, placed, strict=True)
        ]
        return _run(placed, each, host_s * math.exp(sigmas * host_spread), on_host=on_host)

    spread = _spread([op for op in ops if not op.placed.collective], common_spread)
    ranks_spread = _spread([op for op in ops if op.placed.collective], 0.0)
    median = run(0)
    step_s = median.step_s

    def end(sigmas: float) -> float:
        off = run(sigmas).step_s - step_s
        if ranks_spread:
            off = math.copysign(math.hypot(off, run(0, sigmas).step_s - step_s), sigmas)
        return step_s + off

    computing = [
        (kernel_s, where.collective)
        for kernel_s, where in zip(seconds, placed, strict=True)
        if where.stream == exchanges.COMPUTE
    ]
    alone_s = math.fsum(kernel_s for kernel_s, collective in computing if collective is None)
    in_line_s = math.fsum(kernel_s for kernel_s, collective in computing if collective)
    ranks_s = median.exposed_s + in_line_s
    waits_s = step_s - alone_s - ranks_s
    return StepTime(
        median=step_s,
        low=end(-Z_90),
        high=end(Z_90),
        rests_on=_share_out(ops),
        waiting_share=max(waits_s / step_s, 0.0) if step_s else 0.0,
        communication_share=min(ranks_s / step_s, 1.0) if step_s else 0.0,
    )


def _lend(
    placed: Sequence[exchanges.Placed], seconds: list[float], host_s: float, lent: float
) -> list[float]:
    """Return longer times for kernels that run beside collectives, of shards or of replicas.

    Collectives of both at once take no more of the device than one.
    """
    exchanging = (exchanges.COMMUNICATION, exchanges.REPLICATION)
    beside = [number for number, where in enumerate(placed) if where.stream in exchanging]
    if not lent or not beside:
        return seconds
    run = _run(placed, seconds, host_s, on_host=False)
    edges = np.array(_unite((run.starts[number], run.ends[number]) for number in beside)).ravel()
    busy = np.cumsum(np.diff(edges, prepend=edges[0]) * (np.arange(len(edges)) % 2))
    begins, ends = (np.interp(times, edges, busy) for times in (run.starts, run.ends))
    longer = (ends - begins) * lent / (1 - lent)
    return [
        kernel_s + float(more) * (where.stream == exchanges.COMPUTE)
        for kernel_s, more, where in zip(seconds, longer, placed, strict=True)
    ]


def _unite(intervals: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Return the intervals in which at least one of several is, in their order."""
    united: list[list[float]] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1][1] = max(united[-1][1], end)
        else:
            united.append([start, end])
    return united


def _spread(ops: Sequence[Issued], common_spread: float) -> float:
    weighted: dict[tuple[str, Basis], float] = defaultdict(float)
    for op in ops:
        weighted[op.kind, op.time.basis] += op.time.seconds * op.time.spread
    device_s = math.fsum(op.time.seconds for op in ops)
    errors = [*weighted.values(), common_spread * device_s]
    return math.hypot(*errors) / device_s if device_s else 0.0


def _share_out(ops: Sequence[Issued]) -> dict[Basis, float]:
    """Return the share of each basis in the device's time."""
    device_s = math.fsum(op.time.seconds for op in ops)
    return {
        basis: math.fsum(op.time.seconds for op in ops if op.time.basis == basis) / device_s
        for basis in BASES
        if device_s and any(op.time.basis == basis for op in ops)
    }


DRIFT = 0.05  # least spread of all times of a machine together: its load and temperature change

_UPDATE = ("noise", "step")
"""The phases that run once, however many batches a gradient is accumulated over."""


def predict_time(
    ops: Sequence[Op], experiment: Experiment, target: Target | None
) -> tuple[Time | None, dict[str, str]]:
    """Predict how long a step takes, as a result states it.

    The operators are those of a step in the steady state, in order. Without a target they run on
    this machine's processor.

    Returns:
        The time, or None if it is not predicted; and reasons for each figure that is missing.
    """
    if target is None and experiment.parallel is not None:
        return None, {"time": "how long ranks of one processor take is not predicted"}
    try:
        if target is None:
            step = predict_step_here(ops, read_own_table(Path.cwd(), experiment.cpu_threads))
        else:
            is_graph = experiment.execution == "graph"
            ranks = experiment.parallel
            step = predict_step(ops, experiment.dtype, target, is_graph=is_graph, parallel=ranks)
            step = widen(step, experiment, target)
    except (UnknownTimeError, ResultError) as error:
        return None, {"time": f"not predicted: {error}"}
    time = Time(step_s=[], predicted_step_s=step)
    return time, {"time.median_s": "nothing ran; the instrument clean measures it"}


def predict_step(
    ops: Sequence[Op],
    dtype: Dtype,
    target: Target,
    *,
    is_graph: bool = False,
    parallel: Parallel | None = None,
    model_of: Callable[[Target, Dtype], GpuModel] = GpuModel,
) -> PredictedTime:
    """Predict how long a step takes on a GPU.

    Args:
        ops: The operators of a step in the steady state, in order.
        dtype: The dtype of the experiment.
        target: The GPU.
        is_graph: Whether a CUDA graph starts the kernels, so that no kernel waits for the host.
        parallel: The ranks, of which this GPU is one; None for one process.
        model_of: The times of operators; by default those of current libraries.

    Raises:
        UnknownTimeError: The peak of a dtype that the step multiplies in is not known, or how long
            such GPUs take to communicate.
    """
    model = model_of(target, dtype)
    collectives = None if parallel is None else CollectiveModel(target, parallel)
    ranks = 1 if parallel is None else parallel.world_size
    # Blom's approximation to the expected largest of a normal sample.
    slowest = math.exp(AMONG_GPUS * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)))

    def time(op: Op, placed: exchanges.Placed) -> OpTime:
        if placed.collective is not None:
            assert collectives is not None
            return collectives.predict(placed.collective)
        if op.name == exchanges.COPIES_IN:
            own = op.writes[0][1]  # it writes a part of the buffer that it returns
            seconds = 2 * own / (MEMORY.value * target.bandwidth_bytes_per_s)
            return OpTime(seconds, MEMORY.spread, "data sheet")
        predicted = model.predict(op.cost, op.moved_bytes)
        return predicted._replace(seconds=slowest * predicted.seconds)

    def issue(some: Sequence[Op]) -> list[Issued]:
        placed = zip(some, exchanges.place(some, parallel), strict=True)
        return [Issued(op.op_kind, time(op, where), where) for op, where in placed]

    host = NO_HOST if is_graph else model.host
    channels = CHANNELS.get(target.compute_capability, _CHANNELS)
    lent = channels / target.multiprocessors if target.multiprocessors else 0.0
    run = partial(
        combine,
        host_s=host.value,
        host_spread=host.spread,
        common_spread=model.common_spread,
        lent=lent,
    )
    return _state(ops, issue, run, of_ranks=parallel is not None)


def predict_step_here(ops: Sequence[Op], table: OwnTable) -> PredictedTime:
    """Predict how long a step takes on this machine's processor.

    The machine may be faster or slower than when the operators were timed, by as much as between
    rounds of timing.
    """
    distinct = {op.call: op for op in ops}
    predicted = {call: table.predict(shape_of(op)) for call, op in distinct.items()}

    def issue(some: Sequence[Op]) -> list[Issued]:
        times = [predicted[op.call] for op in some]
        return [
            Issued(op.op_kind, time._replace(seconds=time.seconds * table.step_factor))
            for op, time in zip(some, times, strict=True)
        ]

    run = partial(
        combine,
        host_s=table.host_s,
        host_spread=table.host_spread,
        common_spread=math.hypot(DRIFT, table.drift),
        on_host=True,
    )
    return _state(ops, issue, run)


def _state(
    ops: Sequence[Op],
    issue: Callable[[Sequence[Op]], list[Issued]],
    run: Callable[[Sequence[Issued]], StepTime],
    *,
    of_ranks: bool = False,
) -> PredictedTime:
    step = run(issue(ops))
    rest = run(issue([op for op in ops if op.phase not in _UPDATE]))
    fields = step._asdict() | {"without_update": rest.median}
    return PredictedTime(**fields if of_ranks else fields | {"communication_share": None})
