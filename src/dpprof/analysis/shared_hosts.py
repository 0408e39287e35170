"""Which measurements ran while others ran on other GPUs of their host, or on other cores of it."""

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpprof.records.result import Result
from dpprof.spec.registry import PREDICTIONS


class SharedHosts(NamedTuple):
    """The measurements on one kind of device, and how many shared their host."""

    device: str
    is_gpu: bool
    """Otherwise slots of a processor."""

    shared: int
    """Measurements that ended as ok, while another ran on another device of their host."""

    measured: int
    """All that ended as ok."""

    most: int
    """The most devices of a host in use at the same time."""


class _Use(NamedTuple):
    begin: dt.datetime
    end: dt.datetime
    place: str
    """The UUID of a GPU, or the cores of a slot."""

    device: str
    counts: bool


def find_shared_hosts(results: Iterable[Result]) -> list[SharedHosts]:
    """Return each kind of GPU, and each processor, of which measurements shared their host.

    A measurement uses its device from ``started_at`` for ``wall_s``. One that failed shares the
    host too, but its own time is none.
    """
    hosts: dict[tuple[str, bool], list[_Use]] = defaultdict(list)
    for result in results:
        device, host = result.device, result.provenance["host"].get("hostname")
        place = device.get("uuid") or device.get("pinned_to")
        if place is None or host is None or result.instrument in PREDICTIONS:
            continue
        begin = dt.datetime.fromisoformat(result.started_at)
        end = begin + dt.timedelta(seconds=result.wall_s)
        use = _Use(begin, end, str(place), str(device.get("name")), result.outcome == "ok")
        hosts[host, device.get("type") == "cuda"].append(use)
    measured = Counter(use.device for uses in hosts.values() for use in uses if use.counts)
    shared: Counter[tuple[str, bool]] = Counter()
    most: dict[tuple[str, bool], int] = defaultdict(int)
    for (_, is_gpu), uses in hosts.items():
        beside_others, at_once = _find_overlaps(uses)
        for use in beside_others:
            shared[use.device, is_gpu] += use.counts
            most[use.device, is_gpu] = max(most[use.device, is_gpu], at_once)
    return [
        SharedHosts(*key, number, measured[key[0]], most[key])
        for key, number in shared.items()
        if number
    ]


def _find_overlaps(uses: Sequence[_Use]) -> tuple[list[_Use], int]:
    """Return the uses that overlap one of another device, and the most devices at once."""
    overlapping: set[int] = set()
    running: list[int] = []
    most = 0
    for position in sorted(range(len(uses)), key=lambda position: uses[position].begin):
        now = uses[position]
        running = [other for other in running if uses[other].end > now.begin]
        beside = [other for other in running if uses[other].place != now.place]
        overlapping.update([*beside, position] if beside else ())
        running.append(position)
        most = max(most, len({uses[other].place for other in running}))
    return [uses[position] for position in sorted(overlapping)], most
