"""Instrument ``phases``: the time of each phase, and bytes by component at named moments.

Memory is measured before time, so that neither disturbs the other. The allocator is recorded from
before the model exists through warm-up and one more step with snapshots. The timed steps follow
without recording; they wait for the device at the end of every phase.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Measurement, Observed, Time
from dpprof.experiments.records.step_costs import Memory, Snapshot
from dpprof.experiments.records.terms import Phase
from dpprof.measure.devices.device import Device
from dpprof.measure.instruments.census import take_census
from dpprof.measure.instruments.opening import open_experiment, peak_rss_bytes
from dpprof.measure.instruments.snapshots import Snapshots
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.samplers import SamplerPaths
from dpprof.subjects.setup import Training, set_up

_ELSEWHERE = "it would include this instrument; the instrument clean measures it"
_REASONS = {
    "memory.peak_rss_bytes": _ELSEWHERE,
    "memory.snapshots.rss_bytes": _ELSEWHERE,
    "time.warmup_step_s": "the allocator is recorded in them; the instrument clean measures it",
    "throughput": _ELSEWHERE,
}


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Measure one experiment in this process."""
    method, device = open_experiment(experiment)
    recorder = device.recorder()
    snapshots = Snapshots(recorder.read, components=take_census)
    training = set_up(experiment, method, device.torch_device, snapshots.take)
    with recorder.window("first_step"):
        training.step.run(training.batch, enter)
    for _ in range(experiment.warmup_steps - 1):
        training.step.run(training.batch, enter)
    snapshots.take("after_warmup", training.holders)
    paths = SamplerPaths()
    with recorder.window("steady"), training.step.watch_samplers(paths):
        snapshots.watch_step(training, enter)
    recorded = recorder.close()
    steady = recorded.peaks["steady"]

    steps = [_time_phases(training, device, enter) for _ in range(experiment.timed_steps)]
    step_s = [sum(step.values()) for step in steps]
    return Measurement(
        model=training.model,
        samplers=paths.by_layer,
        norm_plan=training.step.norm_plan,
        nonfinite_samples=training.step.nonfinite_samples,
        memory=Memory(
            peak_allocated_bytes=steady.allocated_bytes,
            first_step_peak_allocated_bytes=recorded.peaks["first_step"].allocated_bytes,
            peak_reserved_bytes=steady.reserved_bytes,
            peak_device_used_bytes=steady.device_used_bytes,
            alloc_retries=steady.alloc_retries,
            snapshots=[
                _complete(snapshot, recorded.counters[name].allocated_bytes)
                for name, snapshot in snapshots.taken.items()
            ],
        ),
        time=Time(
            step_s=step_s,
            warmup_step_s=None,
            median_s=statistics.median(step_s),
            phases_s={phase: [step[phase] for step in steps] for phase in steps[0]},
        ),
        observed=Observed(
            step_s=statistics.median(step_s),
            steps=experiment.timed_steps,
            peak_rss_bytes=peak_rss_bytes(),
            peak_allocated_bytes=steady.allocated_bytes,
        ),
        reasons=device.reasons_recorded | _REASONS | paths.reasons | training.step.reasons,
    )


def _time_phases(training: Training, device: Device, enter: Enter) -> dict[Phase, float]:
    """Run one step; return the seconds of each phase, summed if it is entered repeatedly."""
    seconds: dict[Phase, float] = defaultdict(float)

    @contextmanager
    def timed(phase: Phase) -> Iterator[None]:
        start = time.perf_counter()
        yield
        device.synchronize()
        seconds[phase] += time.perf_counter() - start

    device.synchronize()
    training.run_phases(enter, timed)
    return seconds


def _complete(snapshot: Snapshot, allocated_bytes: int | None) -> Snapshot:
    """Add the allocated bytes, and those that the census cannot attribute."""
    assert snapshot.components is not None
    assert allocated_bytes is not None
    rest = allocated_bytes - sum(snapshot.components.values())
    components = snapshot.components | {"unattributed": rest}
    return snapshot.model_copy(
        update={"allocated_bytes": allocated_bytes, "components": components}
    )
