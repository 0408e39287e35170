"""What a result was measured under: the machine, versions and settings, and others on its host.

Numbers of two machines have no common median.
"""

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dpprof.experiments.config.registry import PREDICTIONS
from dpprof.experiments.planning.code_digest import model_libraries
from dpprof.experiments.records.comparison import Across
from dpprof.experiments.records.result import Result

_T = TypeVar("_T", bound=Hashable)


def hardware_of(result: Result) -> str | None:
    """Name the processor with its cores, or the kind of GPU, that a result was measured on.

    None for a prediction, which is the same wherever it is made.
    """
    if result.instrument in PREDICTIONS:
        return None
    device = result.device
    cores = f", {device.get('cores')} cores" if device.get("type") == "cpu" else ""
    return f"{device.get('name')}{cores}"


def machine_of(result: Result) -> str | None:
    """Name the hardware, with a processor's threads where the experiment does not set them."""
    hardware, device = hardware_of(result), result.device
    threads = device.get("threads")
    other_threads = device.get("type") == "cpu" and threads != device.get("cores")
    if hardware is None or not other_threads or result.experiment.cpu_threads:
        return hardware
    return f"{hardware}, {threads} threads"


def find_usual(results: Iterable[Result], tell: Callable[[Result], _T | None]) -> dict[str, _T]:
    """Return what is told of most successful measurements, by the device they ask for.

    Of two machines, or settings, with as many, it is the first.
    """
    counts: dict[str, Counter[_T]] = defaultdict(Counter)
    for result in results:
        told = tell(result)
        if told is not None and result.outcome == "ok":
            counts[result.experiment.device][told] += 1
    return {device: seen.most_common(1)[0][0] for device, seen in counts.items()}


_IN_PREDICTIONS = ("TORCH_CUDNN_SDPA_DEPRIORITIZED",)  # the settings that predictions follow
_NO_SETTINGS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Settings whose effect the device and its number of threads already show."""


class Fact(NamedTuple):
    """Something that must be equal."""

    kind: Across
    name: str


def facts_of(result: Result) -> dict[Fact, Any]:
    """Return the device, versions and settings of a result that must be equal to compare it.

    Nothing ran for a prediction, so of its machine only the threads count, for a CPU's workspaces.
    """
    predicted, on_cpu = result.instrument in PREDICTIONS, result.experiment.device == "cpu"
    device, provenance = result.device, result.provenance
    packages, settings = (provenance.get(key) or {} for key in ("packages", "settings"))
    facts = {Fact("versions", name): packages.get(name) for name in _packages_of(result)}
    if own := packages.get("dpprof"):  # without commits before one release
        facts[Fact("versions", "dpprof")] = own.partition(".dev")[0]
    if not predicted:
        facts[Fact("device", "device")] = hardware_of(result)
    if on_cpu:
        facts[Fact("device", "threads")] = device.get("threads")
    elif not predicted:
        facts[Fact("versions", "triton")] = packages.get("triton")
        facts[Fact("versions", "CUDA")] = provenance.get("cuda")
    elif result.experiment.target is None and result.compute is not None:
        facts[Fact("device", "GPU")] = result.compute.peak_source
    for name, value in settings.items():
        if name in _IN_PREDICTIONS if predicted else name not in _NO_SETTINGS:
            facts[Fact("settings", name)] = value
    return facts


def _packages_of(result: Result) -> tuple[str, ...]:
    return ("torch", "opacus", "dpprof", *model_libraries(result.experiment))


Surroundings = tuple[tuple[Fact, str], ...]


def list_unusual(result: Result, usual: Mapping[str, Surroundings]) -> list[str]:
    """Return how a measurement differs from most, each fact with both values."""
    told = surroundings_of(result)
    if told is None or result.experiment.device not in usual:
        return []
    own, others = dict(told), dict(usual[result.experiment.device])
    return [
        f"{fact.name} {own.get(fact, 'none')} instead of {others.get(fact, 'none')}"
        for fact in sorted({*own, *others})
        if own.get(fact) != others.get(fact)
    ]


def surroundings_of(result: Result) -> Surroundings | None:
    """Return a measurement's versions and settings; None for a prediction.

    Versions of torch, Opacus and what builds a model are left out: results of others are measured
    again.
    """
    if result.instrument in PREDICTIONS:
        return None
    facts, packages = facts_of(result), _packages_of(result)
    kept = (fact for fact in facts if fact.kind != "device" and fact.name not in packages)
    return tuple((fact, str(facts[fact])) for fact in sorted(kept) if facts[fact] is not None)


class SharedHosts(NamedTuple):
    """The measurements on one kind of device, and how many shared their host."""

    device: str
    is_gpu: bool  # otherwise slots of a processor
    shared: int  # measurements that ended as ok, while another ran on another device of their host
    measured: int  # all that ended as ok
    most: int  # the most devices of a host in use at the same time


class _Use(NamedTuple):
    begin: dt.datetime
    end: dt.datetime
    place: str  # the UUID of a GPU, or the cores of a slot
    device: str
    counts: bool


def find_shared_hosts(results: Iterable[Result]) -> list[SharedHosts]:
    """Return each kind of GPU, and each processor, of which measurements shared their host.

    A measurement uses its device from ``started_at`` for ``wall_s``. One that failed shares the
    host too, but its own time is none.
    """
    hosts: dict[tuple[str, bool], list[_Use]] = defaultdict(list)
    for result in results:
        if result.instrument in PREDICTIONS:  # those that come with the package have no host
            continue
        device, host = result.device, result.provenance["host"].get("hostname")
        place = device.get("uuid") or device.get("pinned_to")
        if place is None or host is None:
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
