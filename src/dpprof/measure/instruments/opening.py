"""Opens an experiment in this process, and reads what the system counts for the process."""

import resource
import sys
from pathlib import Path
from typing import Any

import psutil

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import HostIo
from dpprof.measure.devices.device import Device
from dpprof.measure.devices.selection import open_device
from dpprof.subjects.methods.training_step import TrainingStep
from dpprof.subjects.setup import import_method


def open_experiment(experiment: Experiment) -> tuple[type[TrainingStep], Device]:
    """Import what the experiment needs, and return its method and its prepared device."""
    method = import_method(experiment)
    device = open_device(experiment.device)
    device.prepare(experiment)
    return method, device


def peak_rss_bytes() -> int:
    """Return the largest resident memory of the process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_counts(process: psutil.Process) -> Any:
    """Return the operating system's counters of a process; None where there are none."""
    try:
        return process.io_counters()
    except (AttributeError, psutil.Error):  # macOS has none, and a sandbox may hide them
        return None


def count_io(process: psutil.Process, before: Any, steps: int) -> HostIo | None:
    """Return what was read and written since ``before``; None where there are no counters."""
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
