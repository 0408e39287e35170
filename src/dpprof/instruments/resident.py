"""The resident high-water mark of the process."""

import resource
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """Return the largest resident memory of the process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
