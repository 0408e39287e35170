"""The figures of a result that are exact: equal runs have equal ones, without noise."""

from collections.abc import Container, Iterable, Iterator
from typing import Literal, NamedTuple

from dpprof.records.comparison import FigureName, Metric
from dpprof.records.result import Result
from dpprof.records.step_costs import Compute, Exchange, Io, Memory
from dpprof.spec.experiment import device_of

Unit = Literal["bytes", "FLOPs", "samples", "seconds"]


class Figure(NamedTuple):
    """A figure that any run of an instrument has."""

    metric: Metric
    name: FigureName
    unit: Unit | None = "bytes"
    part: str | None = None
    phase: str | None = None
    more_is_better: bool = False


Family = dict[Figure, int | float]
"""Figures that are known together; one that is absent is 0."""


class FamilyKey(NamedTuple):
    """What a family is of."""

    name: str
    batch_size: int | None = None
    """The batch that a capacity found, and of which it states the family."""


def list_families(result: Result, metrics: Container[Metric]) -> dict[FamilyKey, Family]:
    """Return the exact figures of a result by family; none of a run that failed.

    Resident memory and what a real allocator reserves are not exact, so they are not among them.
    """
    if result.outcome != "ok":
        return {}
    of = None if result.capacity is None else result.capacity.stated_batch_size
    families: dict[FamilyKey, Family] = {}
    if "memory" in metrics:
        families[FamilyKey("largest batches")] = _largest_batches(result)
        if result.memory is not None:
            for figure, value in _peaks(result.memory):
                families[FamilyKey(figure.name, of)] = {figure: value}
            families[FamilyKey("components", of)] = _components(result.memory)
    if "flops" in metrics:
        if result.compute is not None:
            families[FamilyKey("FLOPs", of)] = _flops(result.compute)
        if result.io is not None:
            families[FamilyKey("operators", of)] = _operators(result.io)
        families[FamilyKey("communication", of)] = _exchanges(result.communication or ())
    if "time" in metrics:
        families[FamilyKey("predicted step time", of)] = _predicted_time(result)
    return {key: family for key, family in families.items() if family}


def _largest_batches(result: Result) -> Family:
    found = result.capacity
    if found is None:
        return {}
    return {
        Figure("memory", "largest batch", "samples", more_is_better=True): found.batch_size,
        Figure("memory", "largest safe batch", "samples", more_is_better=True): (
            found.safe_batch_size or 0
        ),
    }


def _peaks(memory: Memory) -> Iterator[tuple[Figure, int]]:
    peak, first = memory.peak_allocated_bytes, memory.first_step_peak_allocated_bytes
    if peak is not None:
        yield Figure("memory", "peak"), peak
    if first is not None:
        yield Figure("memory", "peak of the first step"), first
    if (simulated := memory.allocator) is not None:
        yield Figure("memory", "reserved"), simulated.reserved_bytes
        expandable = simulated.expandable_reserved_bytes
        yield Figure("memory", "reserved with expandable segments"), expandable
        if simulated.fits is not None:
            yield Figure("memory", "fits", None, more_is_better=True), int(simulated.fits)


def _components(memory: Memory) -> Family:
    held = {} if memory.at_peak is None else memory.at_peak.components
    return {Figure("memory", "component", part=name): size for name, size in held.items()}


def _flops(compute: Compute) -> Family:
    found: Family = {
        Figure("flops", "executed FLOPs", "FLOPs"): compute.executed_flops,
        Figure("flops", "other FLOPs", "FLOPs"): compute.other_flops,
    }
    if compute.model_flops is not None:
        found[Figure("flops", "model FLOPs", "FLOPs")] = compute.model_flops
    return found


def _operators(io: Io) -> Family:
    found: Family = {Figure("flops", "bytes moved"): io.bytes_read + io.bytes_written}
    for work in io.by_phase_and_op_kind:
        found[Figure("flops", "FLOPs", "FLOPs", work.op_kind, work.phase)] = work.flops
        moved = work.read + work.written
        found[Figure("flops", "bytes moved", "bytes", work.op_kind, work.phase)] = moved
    return found


def _exchanges(communication: Iterable[Exchange]) -> Family:
    return {
        Figure("flops", "bytes sent", "bytes", one.collective, one.phase): one.bytes_each_way
        for one in communication
    }


def _predicted_time(result: Result) -> Family:
    """Return the predicted time for a GPU; that for a CPU rests on times measured on it."""
    target, time = result.experiment.target, result.time
    if target is None or device_of(target) == "cpu" or time is None:
        return {}
    if time.predicted_step_s is None:
        return {}
    return {Figure("time", "predicted step time", "seconds"): time.predicted_step_s.median}
