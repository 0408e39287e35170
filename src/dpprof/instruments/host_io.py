"""What the process reads and writes while it steps, which should be next to nothing."""

from typing import Any

import psutil

from dpprof.records.result import HostIo


def read_counts(process: psutil.Process) -> Any:
    """Read the operating system's counters of a process; None where it has none."""
    try:
        return process.io_counters()
    except (AttributeError, psutil.Error):  # macOS has none, and a sandbox may hide them
        return None


def count_io(process: psutil.Process, before: Any, steps: int) -> HostIo | None:
    """Say what was read and written since, over a number of steps; None where nothing counts."""
    after = read_counts(process)
    if before is None or after is None or not hasattr(after, "read_chars"):
        return None
    return HostIo(
        bytes_read=after.read_chars - before.read_chars,
        bytes_written=after.write_chars - before.write_chars,
        storage_bytes_read=after.read_bytes - before.read_bytes,
        storage_bytes_written=after.write_bytes - before.write_bytes,
        steps=steps,
    )


def why_no_counts(counted: HostIo | None) -> dict[str, str]:
    """Say why it is not known, where it is not."""
    return {} if counted else {"host_io": "the operating system does not count it for a process"}
