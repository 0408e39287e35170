"""What ranks exchange: collectives, the roles of their tensors, and the streams that they run on.

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

The bytes of a collective are those of the ring algorithm, which sends the least that each rank must
send (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"). Of S bytes on N ranks: all-gather and reduce-scatter send and receive S (N - 1) / N,
where S is the size of the whole tensor; all-reduce is one after the other, on S bytes; broadcast
passes S on once.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpprof.experiments.config.parallel import Parallel
from dpprof.experiments.records.step_costs import Exchange
from dpprof.experiments.records.terms import Component, Phase
from dpprof.predict.memory.events import Op
from dpprof.private.ranks.ranks import groups_of, states_of
from dpprof.private.substitutes import substitute

COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
}
"""Collectives by the name of PyTorch's operator."""


class Collective(NamedTuple):
    """A collective that a rank took part in."""

    name: str
    payload: int  # bytes of the whole tensor, S
    ranks: int  # ranks of its group, N


def read_collective(op: str, sizes: Sequence[int], world_size: int) -> Collective | None:
    """Return the collective that an operator is; None for any other operator.

    A rank's own part of what is gathered or scattered is the smallest of its tensors.

    ``world_size`` is for a collective whose tensors do not tell how many ranks take part.
    """
    name = COLLECTIVES.get(op.removeprefix("c10d."))
    if name is None:
        return None
    if name not in ("all-gather", "reduce-scatter"):
        return Collective(name, sum(sizes), world_size)
    own = min(sizes)
    is_one_buffer = op.endswith("_base_")
    ranks = max(sizes) // own if is_one_buffer and own else world_size
    return Collective(name, ranks * own, ranks)


def sum_exchanges(calls: Iterable[tuple[Collective, Phase]]) -> list[Exchange]:
    """Sum calls by collective and phase, in the order in which they began."""
    groups: dict[tuple[str, Phase], list[Collective]] = defaultdict(list)
    for call, phase in calls:
        groups[call.name, phase].append(call)
    return [
        Exchange(
            collective=collective,
            phase=phase,
            calls=len(alike),
            payload_bytes=sum(call.payload for call in alike),
            bytes_each_way=sum(bytes_each_way(*call) for call in alike),
        )
        for (collective, phase), alike in groups.items()
    ]


def bytes_each_way(collective: str, payload: int, world_size: int) -> int:
    """Return what a rank sends, which is also what it receives."""
    if collective == "broadcast":
        return payload
    rounds = 2 if collective == "all-reduce" else 1
    return rounds * payload * (world_size - 1) // world_size


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
    waits: tuple[int, ...]  # operators on other streams that must have ended, by their positions
    collective: Collective | None  # what it exchanges; None for an operator that is no collective


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


Roles = Mapping[int | str, Component]  # components by the position or name of an argument


def find_roles() -> dict[Any, Roles]:
    """Find the operators that this process has, with the roles of their arguments.

    FSDP copies shards into the buffer of an all-gather, and its output into the gathered
    parameters. It copies gradients into the buffer of a reduce-scatter, whose output is the shards'
    gradients, and so does clipping with its sums. Its operators exist once it is imported.
    """
    c10d, fsdp = torch.ops.c10d, torch.ops.fsdp
    roles: dict[Any, Roles] = {
        c10d._allgather_base_: {0: "communication_buffers", 1: "communication_buffers"},
        c10d._reduce_scatter_base_: {1: "communication_buffers"},
        c10d.allreduce_: {0: "communication_buffers"},
    }
    if hasattr(fsdp, "chunk_cat"):
        roles |= {
            fsdp.all_gather_copy_in: {0: "communication_buffers", 1: "communication_buffers"},
            fsdp.split_with_sizes_copy: {"out": "unsharded_parameters"},
            fsdp.chunk_cat: {0: "unsharded_gradients", "out": "communication_buffers"},
        }
    return roles


def find_gathered(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield what FSDP has gathered parameters into, with the module of each parameter."""
    for state in states_of(model):
        for group in groups_of(state):
            for parameter in group.fsdp_params:
                for tensor in parameter.all_gather_outputs:
                    yield parameter._module_info.module, tensor  # noqa: SLF001 (no public name)


def takes_dtensors(types: Iterable[type]) -> bool:
    """Return whether an operator is called on a ``DTensor``, from a dispatcher's ``types``."""
    return any(kind.__name__ == "DTensor" for kind in types)


@contextmanager
def around_propagation(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a context around each search for the whole shape of a ``DTensor``, within this.

    PyTorch finds the shape by running the operator on fake tensors of the whole size, which no
    device ever holds.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(module.ShardingPropagator, name)

    def propagate_within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return propagate(*args, **kwargs)

    with substitute(module.ShardingPropagator, name, propagate_within):
        yield
