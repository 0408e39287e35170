"""Instrument ``clean``: step times and the allocator's own counters, nothing else.

The timed steps run with no observer but a byte that says which phase is under way
(which is how a killed process can still be asked where it was). Snapshots inside a step
are taken in one more step after the timed ones, so that reading counters costs no timed
step anything.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from dpprof.devices.base import Device
from dpprof.devices.selection import open_device
from dpprof.experiment import Experiment
from dpprof.instruments.setup import Training, import_method, set_up
from dpprof.methods.base import Enter
from dpprof.result import Measurement, Memory, Phase, Snapshot, Throughput, Time

_AFTER: dict[Phase, str] = {
    "forward": "after_forward",
    "backward": "after_backward",
    "second_backward": "after_second_backward",
    "step": "after_step",
}


class _Snapshots:
    """Collects snapshots at named moments."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._start = time.perf_counter()
        self.taken: dict[str, Snapshot] = {}

    def take(self, name: str) -> None:
        """Record the counters under a name; a name met again is recorded anew."""
        counters = self._device.counters()
        self.taken[name] = Snapshot(
            name=name,
            allocated_bytes=counters.allocated_bytes,
            reserved_bytes=counters.reserved_bytes,
            rss_bytes=self._process.memory_info().rss,
            elapsed_s=time.perf_counter() - self._start,
        )

    def watch_step(self, training: Training, enter: Enter) -> None:
        """Run one step, taking a snapshot at the end of the phases that have one."""
        current: Phase | None = None

        def enter_and_take(phase: Phase | None) -> None:
            nonlocal current
            if current in _AFTER:
                self.take(_AFTER[current])
            current = phase
            if phase is not None:
                enter(phase)

        self.take("before_forward")
        training.step.run(training.batch, enter_and_take)
        enter_and_take(None)


def _peak_rss_bytes() -> int:
    """Return the process's resident high-water mark."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _timed(device: Device, steps: int, run: Callable[[], None]) -> list[float]:
    """Run a number of steps back to back and return the seconds of each."""
    clock = device.clock()
    clock.tick()
    for _ in range(steps):
        run()
        clock.tick()
    return clock.durations_s()


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Measure one experiment in this process.

    Args:
        experiment: What to run.
        enter: Called as each phase begins.
    """
    method = import_method(experiment)
    device = open_device(experiment.device)
    device.prepare(experiment)
    snapshots = _Snapshots(device)
    training = set_up(experiment, method, device, snapshots.take)

    def run() -> None:
        training.step.run(training.batch, enter)

    device.reset_peaks()
    warmup_step_s = _timed(device, 1, run)
    first_step = device.peaks()
    warmup_step_s += _timed(device, experiment.warmup_steps - 1, run)
    snapshots.take("after_warmup")

    device.reset_peaks()
    step_s = _timed(device, experiment.timed_steps, run)
    steady = device.peaks()
    peak_rss_bytes = _peak_rss_bytes()

    snapshots.watch_step(training, enter)
    return Measurement(
        model=training.model,
        memory=Memory(
            peak_allocated_bytes=steady.allocated_bytes,
            first_step_peak_allocated_bytes=first_step.allocated_bytes,
            peak_reserved_bytes=steady.reserved_bytes,
            peak_rss_bytes=peak_rss_bytes,
            peak_device_used_bytes=steady.device_used_bytes,
            alloc_retries=steady.alloc_retries,
            snapshots=list(snapshots.taken.values()),
        ),
        time=Time(step_s=step_s, warmup_step_s=warmup_step_s, median_s=statistics.median(step_s)),
        throughput=_throughput(experiment, statistics.median(step_s)),
        reasons=dict(device.reasons),
    )


def _throughput(experiment: Experiment, step_s: float) -> Throughput:
    samples_per_s = experiment.batch_size / step_s
    return Throughput(
        tokens_per_s=samples_per_s * experiment.seq_len,
        samples_per_s=samples_per_s,
        steps_per_s=1 / step_s,
    )
