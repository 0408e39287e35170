"""Reads a Chrome trace of torch.profiler, and writes the files of a trace.

Read are spans on the host, kernels, and their launches: complete events (``ph: X``) with ``ts`` and
``dur`` in microseconds, as Kineto writes them into ``traceEvents``. A kernel and the call that
launched it carry the same ``correlation``. Written are files for Perfetto and TensorBoard.
"""

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.records.result import Kernels
from dpprof.measure.traces.tensorboard_events import TensorBoard
from dpprof.system.files import write_atomically

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
    correlation: int | None  # the number shared by a kernel and the call that launched it
    bytes: int  # the bytes that a copy moved


class Trace(NamedTuple):
    """The spans of a trace, by place."""

    host: list[Span]  # operators and annotations
    calls: list[Span]  # calls of the driver
    device: list[Span]  # kernels, copies and fills


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


def find_steps(trace: Trace) -> list[tuple[float, float]]:
    """Return the start and end of each step, in order."""
    return sorted((span.start_s, span.end_s) for span in trace.host if span.name == STEP)


def cover_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of the spans, sorted by start, was active.

    A span that ends before it starts never was.
    """
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


TRACE_LIMIT_BYTES = 32 * 2**20  # the largest size of a trace's file

TRACE_NAME = "dpprof.pt.trace.json.gz"
"""The name that TensorBoard's profiler plug-in requires of a trace; Perfetto opens it too."""

_US_PER_S = 1e6


class Written(NamedTuple):
    """A trace's file: its size and its number of steps."""

    bytes: int
    steps: int


def write_trace(
    folder: Path, document: Mapping[str, Any], limit_bytes: int = TRACE_LIMIT_BYTES
) -> Written | None:
    """Write a trace to ``TRACE_NAME``; cut it to its first step if the file would exceed the limit.

    Returns:
        The written file; None, without a file, if even one step exceeds the limit.
    """
    path = folder / TRACE_NAME
    path.unlink(missing_ok=True)
    steps = find_steps(read_trace(document))
    cuts = [(document, len(steps))]
    if len(steps) > 1:
        events, end_us = document["traceEvents"], steps[0][1] * _US_PER_S
        # Those without a time name processes and threads.
        kept = [event for event in events if event["ph"] == "M" or event["ts"] <= end_us]
        cuts.append(({**document, "traceEvents": kept}, 1))
    for cut, count in cuts:
        packed = gzip.compress(json.dumps(cut, allow_nan=False).encode(), compresslevel=6, mtime=0)
        if len(packed) <= limit_bytes:
            write_atomically(path, packed)
            return Written(len(packed), count)
    return None


def write_events(folder: Path, kernels: Kernels) -> None:
    """Write a step's milliseconds by op kind and phase for TensorBoard; replace existing events."""
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    seconds = {"step": kernels.step_s, "idle": kernels.idle_s, "total": kernels.total_s}
    seconds |= {f"op_kind/{name}": value for name, value in kernels.by_op_kind.items()}
    seconds |= {f"phase/{name}": value for name, value in kernels.by_phase.items()}
    board = TensorBoard(folder)
    board(0, {f"kernels_ms/{name}": value * 1e3 for name, value in seconds.items()})
    board.close()
