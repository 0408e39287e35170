"""Which stream of a GPU each operator of a rank runs on, and what it waits for.

The host issues operators in one order. The GPU runs those of one stream in this order, and an
operator of another stream beside them, once what it reads is there. FSDP2 has a stream that copies
shards into the buffer of a gather, and streams for collectives; DDP reduces its buckets on another
stream too. NCCL runs the collectives of a group one after another, so those among shards are one
stream here, and HSDP's among replicas another. Every other collective runs in line, in the stream
that computes.

FSDP2 bounds what is in flight (``FSDPParamGroup`` in torch/distributed/fsdp/_fully_shard): a gather
of forward waits for the copy out of the gather before the last, so that two are alive; one of
backward waits for the last copy out; and a block's gradients are copied together when the
reduce-scatter before it has ended.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dpprof.experiments.config.parallel import Parallel
from dpprof.predict.flops.collectives import Collective, read_collective
from dpprof.predict.memory.events import Op

COMPUTE, COMMUNICATION, COPY_IN, REPLICATION = range(4)
STREAMS = 4

CASTS = "_foreach_copy_"
COPIES_IN = "fsdp.all_gather_copy_in"
COPIES_OUT = "fsdp.split_with_sizes_copy"
JOINS = "fsdp.chunk_cat"
"""Names of FSDP's copies: a cast before a gather, into and out of its buffer, and gradients'."""

IN_FLIGHT = {"forward": 2}
"""A gather waits for this copy out, counted back from the last, by phase; 1 in others."""


class Placed(NamedTuple):
    """Where an operator runs."""

    stream: int
    waits: tuple[int, ...]
    """Operators on other streams that must have ended, by their positions."""

    collective: Collective | None
    """What it exchanges; None for an operator that is no collective."""


def place(ops: Sequence[Op], parallel: Parallel | None) -> list[Placed]:
    """Place the operators of a step.

    The operators come in the order in which the host issues them. Without ``parallel`` there is one
    process.
    """
    if parallel is None:
        return [Placed(COMPUTE, (), None)] * len(ops)
    writers: dict[int, int] = {}
    placed: list[Placed] = []
    copies_out: list[int] = []
    scattered: set[int] = set()
    reduced: int | None = None
    for index, op in enumerate(ops):
        collective = read_collective(op.name, [size for _, size in op.reads], parallel.world_size)
        stream = _find_stream(ops, index, collective, writers, parallel)
        if collective and scattered.intersection(number for number, _ in op.reads):
            collective, stream = collective._replace(ranks=parallel.replicas), REPLICATION
        before = {writers[number] for number, _ in op.reads if number in writers}
        waits = {earlier for earlier in before if placed[earlier].stream != stream}
        last = IN_FLIGHT.get(op.phase, 1)
        if stream == COPY_IN and len(copies_out) >= last:
            waits.add(copies_out[-last])
        if op.name == JOINS and reduced is not None:
            waits.add(reduced)
        placed.append(Placed(stream, tuple(waits), collective))
        writers.update((number, index) for number, _ in op.writes if number >= 0)
        if op.name == COPIES_OUT:
            copies_out.append(index)
        if stream == COMMUNICATION and collective and collective.name == "reduce-scatter":
            reduced = index
            if parallel.kind == "hsdp":
                scattered.update(number for number, _ in op.writes)
    return placed


def _find_stream(
    ops: Sequence[Op],
    index: int,
    collective: Collective | None,
    writers: dict[int, int],
    parallel: Parallel,
) -> int:
    op = ops[index]
    is_cast = op.name == CASTS and index + 1 < len(ops) and ops[index + 1].name == COPIES_IN
    if op.name == COPIES_IN or is_cast:
        return COPY_IN
    if collective is None:
        return COMPUTE
    if parallel.kind == "ddp":
        return COMMUNICATION if op.phase == "backward" else COMPUTE
    sources = {ops[writers[number]].name for number, _ in op.reads if number in writers}
    return COMMUNICATION if sources & {COPIES_IN, JOINS} else COMPUTE
