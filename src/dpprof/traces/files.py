"""The files of a trace: for Perfetto, and for TensorBoard."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.system.files import write_atomically
from dpprof.traces.launching_ops import find_steps
from dpprof.traces.spans import read_trace

LIMIT_BYTES = 32 * 2**20
"""No trace's file is larger."""

NAME = "dpprof.pt.trace.json.gz"
"""What Perfetto opens, and how TensorBoard's profiler plug-in wants a trace to be called."""

_US = 1e6


class Written(NamedTuple):
    """A trace's file."""

    bytes: int
    steps: int


def write_trace(
    folder: Path, document: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES
) -> Written | None:
    """Write a trace, cut to its first step where it would be larger than the limit.

    Args:
        folder: Where the file goes, under the name ``NAME``.
        document: As parsed from the JSON that ``export_chrome_trace`` writes.
        limit_bytes: The most that the compressed file may have.

    Returns:
        None if even one step is larger; no file is left then.
    """
    path = folder / NAME
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
    """Leave out what began later, but for what names processes and threads."""
    kept = [e for e in document["traceEvents"] if e["ph"] == "M" or e["ts"] <= end_s * _US]
    return {**document, "traceEvents": kept}
