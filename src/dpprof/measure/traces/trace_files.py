"""Writes the files of a trace, for Perfetto and TensorBoard."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.records.result import Kernels
from dpprof.measure.traces.launching_ops import find_steps
from dpprof.measure.traces.spans import read_trace
from dpprof.measure.traces.tensorboard_events import TensorBoard
from dpprof.system.files import write_atomically

TRACE_LIMIT_BYTES = 32 * 2**20
"""The largest size of a trace's file."""

TRACE_NAME = "dpprof.pt.trace.json.gz"
"""The name that TensorBoard's profiler plug-in requires of a trace; Perfetto opens it too."""

_US = 1e6


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
        cuts.append((_cut(document, steps[0][1]), 1))
    for cut, count in cuts:
        packed = gzip.compress(json.dumps(cut, allow_nan=False).encode(), compresslevel=6, mtime=0)
        if len(packed) <= limit_bytes:
            write_atomically(path, packed)
            return Written(len(packed), count)
    return None


def _cut(document: Mapping[str, Any], end_s: float) -> dict[str, Any]:
    """Return a trace without later events, except those that name processes and threads."""
    kept = [e for e in document["traceEvents"] if e["ph"] == "M" or e["ts"] <= end_s * _US]
    return {**document, "traceEvents": kept}


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
