"""Parses a Chrome trace of torch.profiler: spans on the host, kernels, and their launches.

The fields are those that Kineto writes into ``traceEvents``: complete events (``ph: X``) with
``ts`` and ``dur`` in microseconds. A kernel and the call that launched it carry the same
``correlation``.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

STEP = "dpprof step"
PHASE = "dpprof phase: "
NORMS = "dpprof norms"
"""Names of the spans that dpprof adds to a trace."""

_HOST = ("cpu_op", "user_annotation")
_CALLS = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_US = 1e-6
_NO_NUMBER = re.compile(rb'("\s*:\s*)-?(?:nan|inf|NaN|Infinity)(?=\s*[,}])')


class Span(NamedTuple):
    """An event with a duration, in seconds since an arbitrary instant."""

    name: str
    start_s: float
    end_s: float
    thread: Any
    correlation: int | None
    """The number shared by a kernel and the call that launched it."""

    bytes: int
    """The bytes that a copy moved."""


class Trace(NamedTuple):
    """The spans of a trace, by place."""

    host: list[Span]
    """Operators and annotations."""

    calls: list[Span]
    """Calls of the driver."""

    device: list[Span]
    """Kernels, copies and fills."""


def parse_trace(content: bytes) -> dict[str, Any]:
    """Return the parsed JSON of ``export_chrome_trace``, with null for ``nan`` and ``inf``.

    Kineto writes these where it divides by an unknown property of a device. Neither JSON nor
    Perfetto accepts them.
    """
    document: dict[str, Any] = json.loads(_NO_NUMBER.sub(rb"\1null", content))
    return document


def read_trace(document: Mapping[str, Any]) -> Trace:
    """Return the spans in the parsed JSON of ``export_chrome_trace``, by place."""
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    return Trace(
        *(
            [_read(event) for event in complete if event.get("cat") in kinds]
            for kinds in (_HOST, _CALLS, _DEVICE)
        )
    )


def _read(event: Mapping[str, Any]) -> Span:
    args = event.get("args", {})
    start_us = event["ts"]
    return Span(
        name=event["name"],
        start_s=start_us * _US,
        end_s=(start_us + event["dur"]) * _US,
        thread=(event["pid"], event["tid"]),
        correlation=args.get("correlation"),
        bytes=args.get("bytes", 0),
    )


def cover_s(spans: "list[tuple[float, float]]") -> float:
    """Return the seconds in which at least one of the spans, sorted by start, was active."""
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
