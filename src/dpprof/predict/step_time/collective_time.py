"""How long a collective takes among GPUs.

Inside a node: measured times of NCCL, between whose sizes time is linear in bytes, as a latency and
a bandwidth make it. Beyond the largest size, bandwidth stays. Between nodes: a ring of all ranks,
or for an all-reduce a tree of nodes, whichever is faster, by the latencies that NCCL has reckoned
with (src/graph/tuning.cc of NVIDIA/nccl) and the bandwidth of the slower of NVLink and network. The
latencies are those of earlier releases: with later ones the times that others measured between
nodes are 24 % off in the median, not 12.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpprof.experiments.config import datasheets
from dpprof.experiments.config.parallel import Parallel
from dpprof.experiments.config.target import Target
from dpprof.experiments.records.terms import Basis
from dpprof.predict.memory.exchanges import Collective, bytes_each_way
from dpprof.predict.step_time.gpu_model import MEASURED
from dpprof.predict.step_time.op_time import OpTime, UnknownTimeError
from dpprof.predict.step_time.product_table import read_document

TABLE = "collectives"

_TABLES = {**MEASURED, datasheets.A100_40GB: "a100"}
"""The table of each device. The A100 with 40 GB has the links of the one with 80 GB."""

NETWORK = 0.88
"""Share of a network's bandwidth that large collectives reach: 86 and 96 of 100 GB/s (A100, 2 and 3
nodes), 360 of 400 (H100, 4 nodes), 382 of 400 (B200, 4 nodes): perf/collective_tables.md."""

BETWEEN_NODES, SMALL_BETWEEN_NODES = 0.3, 1.0
"""Spread of times between nodes, from 16 MiB on and below. Times that others measured differ from
these by a factor of at most 1.6, and below 16 MiB of up to 6 (perf/collective_tables.md). How a
network is wired is not known."""

_SMALL = 2**24

_RING_BUFFER = 65_536 / 16
_PLATEAU = 1.9
"""From this many bytes for each rank on, a ring's all-reduce between nodes takes this many times
its latency."""


class _Protocol(NamedTuple):
    """Seconds of a protocol of NCCL: at the start, for a step inside a node and between nodes."""

    start_s: float
    inside_s: float
    between_s: float
    share: float  # the share of the bandwidth that it reaches


_RINGS = (_Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0), _Protocol(3.6e-6, 0.85e-6, 2.7e-6, 0.25))
"""Simple, which moves most bytes, and LL, which waits least."""

_TREES = (_Protocol(0.0, 28e-6, 50e-6, 0.9), _Protocol(4.4e-6, 0.94e-6, 5e-6, 0.9 / 3.8))


def interpolate_s(size: float, sizes: Sequence[float], times: Sequence[float]) -> float:
    """Return the time of a size between measured ones; beyond the last, its bandwidth holds."""
    if size >= sizes[-1]:
        return times[-1] * size / sizes[-1]
    return float(np.interp(size, sizes, times))


class CollectiveModel:
    """The times of collectives among GPUs of one kind.

    Args:
        target: The GPU.
        parallel: How many are in a node, what connects nodes, and who shards with whom.

    Raises:
        UnknownTimeError: No times of collectives among such GPUs are known.
    """

    def __init__(self, target: Target, parallel: Parallel) -> None:
        name = _TABLES.get(target)
        if name is None:
            raise UnknownTimeError(
                "how long ranks take to communicate is known for the targets "
                f"{', '.join(sorted((*MEASURED.values(), 'a100-40gb')))}"
            )
        self._is_own = target in MEASURED
        document = read_document(TABLE)
        self._sizes: list[int] = document["bytes"]
        self._times: dict[str, dict[str, list[int]]] = document["times"][name]
        self._spread: float = document["spread"]
        self._parallel = parallel
        own: float = document["network_bytes_per_s"][name]
        stated = parallel.network_gb_per_s
        self._network = own if stated is None else stated * 1e9

    def predict(self, collective: Collective) -> OpTime:
        """Predict a collective: all-gather, reduce-scatter, all-reduce, all-to-all or broadcast.

        A group of as many ranks as hsdp has replicas, and not shards, has each on its own node.
        """
        name, payload, ranks = collective
        if payload == 0 or ranks == 1:
            return OpTime(0.0, 0.0, "measured at this shape")
        in_node = min(self._parallel.gpus_per_node, ranks)
        if name == "all-reduce" and ranks == self._parallel.replicas < self._parallel.world_size:
            in_node = 1
        if in_node < ranks:
            spread = BETWEEN_NODES if payload >= _SMALL else SMALL_BETWEEN_NODES
            return OpTime(self._between_s(*collective, in_node), spread, "data sheet")
        is_known = self._is_own and ranks <= self._most_ranks
        spread = self._spread * (1 if is_known else 2)
        return OpTime(self._inside_s(*collective), spread, self._find_basis(*collective))

    @property
    def _most_ranks(self) -> int:
        return max(map(int, self._times["all-reduce"]))

    def _find_basis(self, name: str, payload: int, ranks: int) -> Basis:
        is_beyond = payload > self._sizes[-1] or ranks > self._most_ranks
        if is_beyond or not self._is_own or name == "broadcast":
            return "extrapolated"
        is_measured = payload in self._sizes and str(ranks) in self._times["all-reduce"]
        return "measured at this shape" if is_measured else "interpolated"

    def _inside_s(self, collective: str, payload: int, ranks: int) -> float:
        """Return seconds inside a node; between 2, 4 and 8 ranks, linear in their logarithm.

        Among more ranks the bandwidth stays.
        """
        by_ranks = self._times["all-gather" if collective == "broadcast" else collective]
        counts = sorted(map(int, by_ranks))
        each = [interpolate_s(payload, self._sizes, by_ranks[str(n)]) / 1e7 for n in counts]
        seconds = float(np.interp(math.log2(ranks), np.log2(counts), each))
        if ranks > counts[-1]:
            sent = (bytes_each_way(collective, payload, n) for n in (ranks, counts[-1]))
            seconds *= next(sent) / next(sent)
        return seconds

    def _between_s(self, collective: str, payload: int, ranks: int, in_node: int) -> float:
        nodes = -(-ranks // in_node)
        size = self._sizes[-1]
        largest_s = self._inside_s("all-gather", size, max(in_node, 2))
        inside = bytes_each_way("all-gather", size, max(in_node, 2)) / largest_s
        # GPUs that share a node's network in one ring each have their own share of it. The node
        # with the fewest binds.
        network = NETWORK * self._network * (ranks - (nodes - 1) * in_node)
        busbw = min(inside, network)
        rounds = 2 if collective == "all-reduce" else 1
        sent = bytes_each_way(collective, payload, ranks)
        times_s = []
        for way in _RINGS:
            steps_s = (ranks - nodes) * way.inside_s + (nodes - 1) * way.between_s
            slow = rounds == 2 and way is _RINGS[0] and payload >= ranks * _RING_BUFFER  # noqa: PLR2004
            latency_s = way.start_s + rounds * steps_s * (_PLATEAU if slow else 1)
            times_s.append(latency_s + sent / (way.share * busbw))
        if collective == "all-reduce":
            for way in _TREES:
                hops_s = (in_node - 1) * way.inside_s + math.log2(nodes) * way.between_s
                times_s.append(way.start_s + 2 * hops_s + 2 * payload / (way.share * busbw))
        return min(times_s)
