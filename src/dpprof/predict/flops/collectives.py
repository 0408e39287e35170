"""Bytes that a collective makes a rank send and receive.

They are those of the ring algorithm, which sends the least that each rank must send (Patarasuk &
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). Of S bytes on N
ranks: all-gather and reduce-scatter send and receive S (N - 1) / N, where S is the size of the
whole tensor; all-reduce is one after the other, on S bytes; broadcast passes S on once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpprof.experiments.records.step_costs import Exchange
from dpprof.experiments.records.terms import Phase

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
    payload: int
    """Bytes of the whole tensor, S."""

    ranks: int
    """Ranks of its group, N."""


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
