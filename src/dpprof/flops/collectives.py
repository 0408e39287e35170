"""Bytes that a collective makes a rank send and receive.

They are those of the ring algorithm, which sends the least that each rank must send (Patarasuk &
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). Of S bytes on N
ranks: all-gather and reduce-scatter send and receive S (N - 1) / N, where S is the size of the
whole tensor; all-reduce is one after the other, on S bytes; broadcast passes S on once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dpprof.records.step_costs import Exchange
from dpprof.records.terms import Phase

COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
}
"""Collectives by the name of PyTorch's operator."""


def payload_bytes(collective: str, sizes: Sequence[int], world_size: int) -> int:
    """Return S, from the bytes of the tensors that a call was given.

    A rank's own part of what is gathered or scattered is the smallest of them.
    """
    if collective in ("all-gather", "reduce-scatter"):
        return world_size * min(sizes)
    return sum(sizes)


def sum_exchanges(calls: Iterable[tuple[str, Phase, int]], world_size: int) -> list[Exchange]:
    """Sum calls by collective and phase, in the order in which they began.

    Args:
        calls: Collective, phase and S of each call.
        world_size: N.
    """
    groups: dict[tuple[str, Phase], list[int]] = defaultdict(list)
    for collective, phase, payload in calls:
        groups[collective, phase].append(payload)
    return [
        Exchange(
            collective=collective,
            phase=phase,
            calls=len(payloads),
            payload_bytes=sum(payloads),
            bytes_each_way=sum(bytes_each_way(collective, one, world_size) for one in payloads),
        )
        for (collective, phase), payloads in groups.items()
    ]


def bytes_each_way(collective: str, payload: int, world_size: int) -> int:
    """Return what a rank sends, which is also what it receives."""
    if collective == "broadcast":
        return payload
    rounds = 2 if collective == "all-reduce" else 1
    return rounds * payload * (world_size - 1) // world_size
