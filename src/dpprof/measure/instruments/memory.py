"""Instrument ``memory``: every byte of a step that runs, and the cost of its operators."""

import time

import torch

from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Measurement, Observed
from dpprof.measure.devices.cpu import settled_collectives
from dpprof.measure.instruments.opening import open_experiment, peak_rss_bytes
from dpprof.predict.memory import simulated_cuda
from dpprof.predict.memory.caching_allocator import MIN_BLOCK
from dpprof.predict.memory.cuda_workspaces import Processors, cuda_workspaces
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.summary import state_memory
from dpprof.predict.tracing import TimelineRecorder, find_facts, record_cpu, record_timelines, state
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.setup import set_up


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Record the memory of one experiment in this process."""
    method, device = open_experiment(experiment)
    on_cuda = device.torch_device.type == "cuda"
    recorder = _record_cuda() if on_cuda else record_cpu()
    # On CUDA backward has its own thread, whose Python stack does not show the caller.
    with torch.autograd.set_multithreading_enabled(False), settled_collectives(), recorder:
        training = set_up(experiment, method, device.torch_device, lambda *_: None)
        timeline_recorder = TimelineRecorder(recorder, training.step, enter)
        steps = experiment.warmup_steps + 1
        # The allocator's peak must be of the same step as the timeline.
        started = 0.0

        def begin_last() -> None:
            nonlocal started
            device.reset_peaks()
            started = time.perf_counter()

        first, steady = record_timelines(timeline_recorder, training.batch, steps, begin_last)
    device.synchronize()
    counted_s = time.perf_counter() - started
    allocator_peak, resident_bytes = device.peaks().allocated_bytes, peak_rss_bytes()
    ceilings = find_by_device_name(torch.cuda.get_device_name()) if on_cuda else None
    total = int(torch.cuda.get_device_properties().total_memory) if on_cuda else None
    allocator = steady.footprint.simulate(total) if on_cuda else None
    memory = state_memory(experiment, first, steady, allocator_peak, real=True, allocator=allocator)
    facts = find_facts(experiment, training, timeline_recorder.paths)
    measurement = state(experiment, facts, steady, memory=memory, ceilings=ceilings)
    observed = Observed(
        step_s=counted_s,
        steps=1,
        peak_rss_bytes=resident_bytes,
        peak_allocated_bytes=allocator_peak,
    )
    return measurement.model_copy(
        update={"observed": observed, "nonfinite_samples": training.step.nonfinite_samples}
    )


def _record_cuda() -> Recorder:
    gpu = torch.cuda.get_device_properties()
    capability = f"{gpu.major}.{gpu.minor}"
    recorder = Recorder(
        block_bytes=MIN_BLOCK,
        is_there=lambda tensor, _: tensor.is_cuda,
        workspaces=cuda_workspaces(Processors.of(gpu.multi_processor_count, capability)),
    )
    # Forward and backward run on one thread here, with one handle.
    recorder.handles = simulated_cuda.library_workspaces(capability, "forward")
    return recorder
