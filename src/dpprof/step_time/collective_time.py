"""How long a collective takes among GPUs.

Inside a node: measured times of NCCL, between whose sizes time is linear in bytes, as a latency and
a bandwidth make it. Beyond the largest size, bandwidth stays. Between nodes: a ring of all ranks,
or for an all-reduce a tree of nodes, whichever is faster, by the latencies that NCCL itself reckons
with (src/graph/tuning.cc of NVIDIA/nccl) and the bandwidth of the slower of NVLink and network.
"""

import bisect
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from dpprof.flops.collectives import Collective, bytes_each_way
from dpprof.records.terms import Basis
from dpprof.spec import datasheets
from dpprof.spec.parallel import Parallel
from dpprof.spec.target import Target
from dpprof.step_time.op_time import OpTime, UnknownTimeError

FILE = "collectives.json"

_OWN: dict[Target, str] = {
    getattr(datasheets, name.upper()): name for name in ("a100", "b200", "h100", "h200", "l40s")
}
_LIKE: dict[Target, str] = {datasheets.A100_40GB: "a100"}
"""Devices with the links of another."""

NETWORK = 0.88
"""Share of a network's bandwidth that large collectives reach: 86 and 96 of 100 GB/s (A100, 2 and 3
nodes), 360 of 400 (H100, 4 nodes), 382 of 400 (B200, 4 nodes): perf/collective_tables.md."""

BETWEEN_NODES = 0.3
"""Spread of times between nodes: 90 % of what others measured is within 1.6 times
(perf/collective_tables.md). How a network is wired, and who shares it, is not known."""

_RING_BUFFER = 65_536 / 16
_PLATEAU = 1.9
"""From so many bytes for each rank, a ring's all-reduce between nodes has so many latencies."""


class _Protocol(NamedTuple):
    """Seconds of a protocol of NCCL: at the start, for a step inside a node and between nodes."""

    start_s: float
    inside_s: float
    between_s: float
    share: float
    """Of the bandwidth."""


_RINGS = (_Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0), _Protocol(3.6e-6, 0.85e-6, 2.7e-6, 0.25))
"""Simple, which moves most bytes, and LL, which waits least."""

_TREES = (_Protocol(0.0, 28e-6, 50e-6, 0.9), _Protocol(4.4e-6, 0.94e-6, 5e-6, 0.9 / 3.8))


def interpolate_s(size: float, sizes: Sequence[float], times: Sequence[float]) -> float:
    """Return the time of a size between measured ones; beyond the last, its bandwidth holds."""
    if size >= sizes[-1]:
        return times[-1] * size / sizes[-1]
    at = max(bisect.bisect_right(sizes, size), 1)
    low, high = sizes[at - 1], sizes[at]
    part = max((size - low) / (high - low), 0.0)
    return times[at - 1] + part * (times[at] - times[at - 1])


class CollectiveModel:
    """The times of collectives among GPUs of one kind.

    Args:
        target: The GPU.
        parallel: How many are in a node, what connects nodes, and who shards with whom.

    Raises:
        UnknownTimeError: No times of collectives among such GPUs are known.
    """

    def __init__(self, target: Target, parallel: Parallel) -> None:
        name = _OWN.get(target) or _LIKE.get(target)
        if name is None:
            raise UnknownTimeError(
                "how long ranks take to communicate is known for the targets "
                f"{', '.join(sorted((*_OWN.values(), 'a100-40gb')))}"
            )
        self._is_own = target in _OWN
        document = _read_document()
        self._sizes: list[int] = document["bytes"]
        self._times: dict[str, dict[str, list[int]]] = document["times"][name]
        self._spread: float = document["spread"]
        self._parallel = parallel
        own: float = document["network_bytes_per_s"][name]
        given = parallel.network_gb_per_s
        self._network = own if given is None else given * 1e9

    def predict(self, collective: Collective) -> OpTime:
        """Predict a collective: all-gather, reduce-scatter, all-reduce, all-to-all or broadcast.

        A group of as many ranks as hsdp has replicas, and not shards, has each on its own node.
        """
        name, payload, ranks = collective
        if payload == 0 or ranks == 1:
            return OpTime(0.0, 0.0, "measured at this shape")
        nodes = -(-ranks // self._parallel.gpus_per_node)
        if name == "all-reduce" and ranks == self._parallel.replicas < self._parallel.world_size:
            nodes = ranks
        if nodes > 1:
            return OpTime(self._between_s(*collective, nodes), BETWEEN_NODES, "data sheet")
        spread = self._spread * (1 if self._is_own else 2)
        return OpTime(self._inside_s(*collective), spread, self._find_basis(*collective))

    def _find_basis(self, name: str, payload: int, ranks: int) -> Basis:
        if payload > self._sizes[-1] or not self._is_own or name == "broadcast":
            return "extrapolated"
        is_measured = payload in self._sizes and str(ranks) in self._times["all-reduce"]
        return "measured at this shape" if is_measured else "interpolated"

    def _inside_s(self, collective: str, payload: int, ranks: int) -> float:
        """Return seconds inside a node; between 2, 4 and 8 ranks, linear in their logarithm."""
        by_ranks = self._times["all-gather" if collective == "broadcast" else collective]
        counts = sorted(map(int, by_ranks))
        each = [interpolate_s(payload, self._sizes, by_ranks[str(n)]) / 1e7 for n in counts]
        logs = [math.log2(n) for n in counts]
        at = min(math.log2(ranks), logs[-1])
        return (
            interpolate_s(at, [*logs, math.inf], [*each, each[-1]]) if at < logs[-1] else each[-1]
        )

    def _between_s(self, collective: str, payload: int, ranks: int, nodes: int) -> float:
        in_node = ranks // nodes
        size = self._sizes[-1]
        largest_s = self._inside_s("all-gather", size, max(in_node, 2))
        inside = bytes_each_way("all-gather", size, max(in_node, 2)) / largest_s
        # GPUs that share a node's network in one ring each have their own share of it.
        network = NETWORK * self._network * (1 if in_node == 1 else in_node)
        busbw = min(inside, network)
        rounds = 2 if collective == "all-reduce" else 1
        sent = bytes_each_way(collective, payload, ranks)
        found = []
        for way in _RINGS:
            steps_s = (ranks - nodes) * way.inside_s + (nodes - 1) * way.between_s
            slow = rounds == 2 and way is _RINGS[0] and payload >= ranks * _RING_BUFFER  # noqa: PLR2004
            latency_s = way.start_s + rounds * steps_s * (_PLATEAU if slow else 1)
            found.append(latency_s + sent / (way.share * busbw))
        if collective == "all-reduce":
            for way in _TREES:
                hops_s = (in_node - 1) * way.inside_s + math.log2(nodes) * way.between_s
                found.append(way.start_s + 2 * hops_s + 2 * payload / (way.share * busbw))
        return min(found)


@cache
def _read_document() -> dict[str, Any]:
    text = files("dpprof.step_time").joinpath("tables", FILE).read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
