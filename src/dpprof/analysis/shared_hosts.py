"""Which measurements on GPUs ran while others ran on other GPUs of their host."""

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpprof.records.result import Result
from dpprof.spec.registry import PREDICTIONS


class SharedHosts(NamedTuple):
    """The measurements on one kind of GPU, and how many shared their host."""

    gpu: str
    shared: int
    """Measurements that ended as ok, while another ran on another GPU of their host."""

    measured: int
    """All that ended as ok."""

    most_gpus: int
    """The most GPUs of a host in use at the same time."""


class _Use(NamedTuple):
    begin: dt.datetime
    end: dt.datetime
    uuid: str
    gpu: str
    counts: bool


def find_shared_hosts(results: Iterable[Result]) -> list[SharedHosts]:
    """Return each kind of GPU of which measurements shared their host.

    A measurement uses its GPU from ``started_at`` for ``wall_s``. One that failed shares the host
    too, but its own time is none.
    """
    hosts: dict[str, list[_Use]] = defaultdict(list)
    for result in results:
        uuid, host = result.device.get("uuid"), result.provenance["host"].get("hostname")
        if uuid is None or host is None or result.instrument in PREDICTIONS:
            continue
        begin = dt.datetime.fromisoformat(result.started_at)
        end = begin + dt.timedelta(seconds=result.wall_s)
        gpu = str(result.device.get("name") or "GPU")
        hosts[host].append(_Use(begin, end, str(uuid), gpu, result.outcome == "ok"))
    measured = Counter(use.gpu for uses in hosts.values() for use in uses if use.counts)
    shared: Counter[str] = Counter()
    most_gpus: dict[str, int] = defaultdict(int)
    for uses in hosts.values():
        beside_others, most = _find_overlaps(uses)
        shared.update(use.gpu for use in beside_others if use.counts)
        for use in beside_others:
            most_gpus[use.gpu] = max(most_gpus[use.gpu], most)
    return [
        SharedHosts(gpu, number, measured[gpu], most_gpus[gpu]) for gpu, number in shared.items()
    ]


def _find_overlaps(uses: Sequence[_Use]) -> tuple[list[_Use], int]:
    """Return the uses that overlap one of another GPU, and the most GPUs in use at once."""
    overlapping: set[int] = set()
    running: list[int] = []
    most = 0
    for position in sorted(range(len(uses)), key=lambda position: uses[position].begin):
        now = uses[position]
        running = [other for other in running if uses[other].end > now.begin]
        beside = [other for other in running if uses[other].uuid != now.uuid]
        overlapping.update([*beside, position] if beside else ())
        running.append(position)
        most = max(most, len({uses[other].uuid for other in running}))
    return [uses[position] for position in sorted(overlapping)], most
