"""Instrument ``clean``: step times and the allocator's own counters, nothing else.

During the timed steps only the current phase is written, as one byte, so that it is known after a
kill. Snapshots inside a step and code paths are recorded in one more step afterwards; of a graph,
code paths are those of the first step, and there is nothing inside a step. Its peak of allocated
memory is that of the capture: a replay uses the same addresses, and allocates nothing.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import psutil

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Energy, Measurement, Observed, Throughput, Time
from dpprof.experiments.records.step_costs import Memory
from dpprof.measure.devices.device import Device, NoEnergyError
from dpprof.measure.instruments import opening
from dpprof.measure.instruments.snapshots import Snapshots
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.samplers import SamplerPaths
from dpprof.subjects.setup import Training, set_up


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Measure one experiment in this process."""
    method, device = opening.open_experiment(experiment)
    process = psutil.Process()
    snapshots = Snapshots(lambda _: device.counters(), rss=lambda: process.memory_info().rss)
    training = set_up(experiment, method, device.torch_device, snapshots.take)

    paths = SamplerPaths()
    warm = _warm_up(experiment, training, device, enter, paths)
    snapshots.take("after_warmup", training.holders)

    device.reset_peaks()
    before = opening.read_counts(process)
    step_s = device.time(warm.run, experiment.timed_steps)
    host_io = opening.count_io(process, before, experiment.timed_steps)
    steady = device.peaks()
    peak_bytes = steady.allocated_bytes if warm.captured_bytes is None else warm.captured_bytes
    resident_bytes = opening.peak_rss_bytes()

    if experiment.execution != "graph":
        with training.step.watch_samplers(paths):
            snapshots.watch_step(training, enter)
    median_s = statistics.median(step_s)
    of_rank = experiment.accumulation * experiment.batch_size
    energy, why_no_energy = _energy(experiment, device, warm.run, median_s)
    why_no_io = {"host_io": "the operating system does not count it for a process"}
    return Measurement(
        model=training.model,
        samplers=paths.by_layer,
        norm_plan=training.step.norm_plan,
        nonfinite_samples=training.step.nonfinite_samples,
        memory=Memory(
            peak_allocated_bytes=peak_bytes,
            first_step_peak_allocated_bytes=warm.first_step_bytes,
            peak_reserved_bytes=steady.reserved_bytes,
            peak_rss_bytes=resident_bytes,
            peak_device_used_bytes=steady.device_used_bytes,
            alloc_retries=steady.alloc_retries,
            snapshots=list(snapshots.taken.values()),
        ),
        time=Time(step_s=step_s, warmup_step_s=warm.step_s, median_s=median_s),
        throughput=Throughput(
            tokens_per_s=experiment.tokens_in_step / median_s,
            samples_per_s=experiment.world_size * of_rank / median_s,
            steps_per_s=1 / median_s,
        ),
        host_io=host_io,
        energy=energy,
        observed=Observed(
            step_s=median_s,
            steps=experiment.timed_steps,
            peak_rss_bytes=resident_bytes,
            peak_allocated_bytes=peak_bytes,
        ),
        reasons=device.reasons
        | paths.reasons
        | training.step.reasons
        | why_no_energy
        | ({} if host_io else why_no_io),
    )


class _WarmUp(NamedTuple):
    run: Callable[[], object]  # takes one of the steps that are timed
    step_s: list[float]
    first_step_bytes: int | None
    captured_bytes: int | None  # the peak of the capture; None without a graph


def _warm_up(
    experiment: Experiment, training: Training, device: Device, enter: Enter, paths: SamplerPaths
) -> _WarmUp:
    """Take the steps before the timed ones; of a graph, the first one, the capture and replays."""
    run: Callable[[], object] = partial(training.step.run, training.batch, enter)
    device.reset_peaks()
    is_graph = experiment.execution == "graph"
    with training.step.watch_samplers(paths) if is_graph else nullcontext():
        step_s = device.time(run, 1)
    first_step_bytes, captured_bytes = device.peaks().allocated_bytes, None
    if is_graph:
        device.reset_peaks()
        run = training.step.capture(training.batch)
        captured_bytes = device.peaks().allocated_bytes  # a replay allocates nothing
    step_s += device.time(run, experiment.warmup_steps - 1)
    return _WarmUp(run, step_s, first_step_bytes, captured_bytes)


def _energy(
    experiment: Experiment, device: Device, run: Callable[[], object], step_s: float
) -> tuple[Energy | None, dict[str, str]]:
    """Measure the energy of a step after the timed ones; returns it, or why it is unknown."""
    if experiment.parallel is not None:
        why = "each rank would run as many steps as fit in a window, and all must run as many"
        return None, {"energy": why}
    try:
        return device.energy(run, step_s), {}
    except NoEnergyError as error:
        return None, {"energy": str(error)}
