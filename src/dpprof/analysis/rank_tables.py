"""The tables of parallel experiments: each rank's figures, and what ranks exchange."""

from collections.abc import Iterator
from typing import Any

from dpprof.analysis.axes import axes_of, key_of
from dpprof.analysis.collection import Collected
from dpprof.records.result import RankPart
from dpprof.records.step_costs import Exchange

Rows = Iterator[dict[str, Any]]


def list_ranks(collected: Collected) -> Rows:
    """Yield one row per run and rank."""
    for run, result in collected.found:
        for part in result.ranks or []:
            yield key_of(run) | _figures(part)


def _figures(part: RankPart) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "peak_allocated_bytes": part.memory and part.memory.peak_allocated_bytes,
        "peak_reserved_bytes": part.memory and part.memory.peak_reserved_bytes,
        "peak_rss_bytes": part.memory and part.memory.peak_rss_bytes,
        "median_step_s": part.time and part.time.median_s,
        "sent_bytes": sent_bytes(part.communication),
    }


def list_exchanges(collected: Collected) -> Rows:
    """Yield one row per collective in a phase of a run, of rank 0."""
    for run, result in collected.found:
        for exchange in result.communication or []:
            yield key_of(run) | axes_of(result.experiment) | exchange.model_dump()


def sent_bytes(communication: list[Exchange] | None) -> int | None:
    """Return what a rank sends in a step, which is also what it receives; None if not known."""
    if communication is None:
        return None
    return sum(exchange.bytes_each_way for exchange in communication)
