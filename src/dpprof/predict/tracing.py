"""Records every byte of a step and the cost of its operators, and states both as a result.

Recorded is from before the model exists: the first step, and one in the steady state. The
instrument ``memory`` runs them; ``trace_whole`` runs them under fake tensors, without their memory
or their device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType
from typing import NamedTuple

import torch

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.registry import EntryPointError
from dpprof.experiments.config.target import CPU_TARGET, Target
from dpprof.experiments.records.reconciliation import JOINED
from dpprof.experiments.records.result import Measurement, ModelFacts, NormChoice
from dpprof.experiments.records.step_costs import Memory
from dpprof.experiments.records.terms import Component
from dpprof.predict.memory import simulated_cuda
from dpprof.predict.memory.allocator_replay import Footprint
from dpprof.predict.memory.atoms import Recording, around_launches, sort_frees
from dpprof.predict.memory.attribution import StepObserver
from dpprof.predict.memory.caching_allocator import MIN_BLOCK
from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.cuda_workspaces import Processors, cuda_workspaces
from dpprof.predict.memory.fake_operators import FakeOperators
from dpprof.predict.memory.fake_tensors import fake_ranks, fake_tensors
from dpprof.predict.memory.quantized_operators import optimizer_workspaces
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.summary import state_communication, state_compute, state_io, state_memory
from dpprof.predict.memory.timeline import MemoryTimeline
from dpprof.predict.plain_step import count_model_flops
from dpprof.predict.step_time.predict import predict_time
from dpprof.private.allocation_marks import components_by_code
from dpprof.private.errors import UnsupportedError
from dpprof.private.number_formats import KEPT_LOGITS
from dpprof.subjects.methods.training_step import Batch, Enter, TrainingStep
from dpprof.subjects.samplers import SamplerPaths
from dpprof.subjects.setup import TensorHolders, Training, import_method, set_up
from dpprof.system.hardware import visible_gpus

_NOT_KNOWN = {
    "memory.peak_reserved_bytes": "the instrument clean measures it",
    "memory.allocator": "PyTorch's CPU allocator has no pool of blocks",
    "memory.peak_rss_bytes": "the instrument clean measures it",
    "memory.peak_device_used_bytes": "the instrument clean measures it",
    "memory.alloc_retries": "the instrument clean measures it",
    "memory.snapshots": "the instrument phases takes them",
    "time": "it would include recording; the instrument clean measures it",
    "throughput": "it would include recording; the instrument clean measures it",
    "compute.mfu": JOINED,
    "compute.hfu": JOINED,
}
_GRAPH = (
    "peaks are those while the step is captured, and its pool stays reserved; replays allocate "
    "nothing; the graph's own copy of the batch is not counted, nor what the driver keeps of it"
)
_NOT_RUN = {
    "memory.timeline.elapsed_s": "nothing ran, so there are no times",
    "nonfinite_samples": "nothing ran, so there are no numbers",
}


_BATCHES = 3
"""The most accumulated batches that are traced: the first, which finds no gradients, the last, and
one that stands for all between."""


class TimelineRecorder:
    """Runs a training's steps and records their memory.

    The recorder must be active from before the training is set up.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, enter: Enter) -> None:
        self._recorder = recorder
        self._step = step
        self.paths = SamplerPaths()
        self._observer = StepObserver(recorder, step, enter, self.paths)

    def run(self, batch: Batch, *, counting: bool = False) -> MemoryTimeline:
        """Run one step on a batch.

        With ``counting`` operators are recorded with their costs.
        """
        start = len(self._recorder.events)
        self._recorder.counting = counting
        with self._observer.watching():
            self._observer.run(batch)
        births = components_by_code(self._step.births)
        return MemoryTimeline(self._recorder, births, (start, len(self._recorder.events)))


def record_timelines(
    timeline_recorder: TimelineRecorder,
    batch: Batch,
    steps: int,
    before_last: Callable[[], None] = lambda: None,
) -> tuple[MemoryTimeline, MemoryTimeline]:
    """Run two or more steps on one batch; returns the timelines of the first and the last."""
    first = timeline_recorder.run(batch)
    for _ in range(steps - 2):
        timeline_recorder.run(batch)
    before_last()
    return first, timeline_recorder.run(batch, counting=True)


def record_cpu(call: FakeOperators | None = None) -> Recorder:
    """Make a recorder of what this machine's CPU allocates."""
    return Recorder(
        is_there=lambda tensor, _: tensor.device.type == "cpu",
        call=call,
        workspaces={**CPU_WORKSPACES, **optimizer_workspaces()},
    )


class Facts(NamedTuple):
    """What a result says of a training beside its steps."""

    model: ModelFacts
    samplers: dict[str, str] | None
    norm_plan: dict[str, NormChoice] | None
    model_flops: int | None
    reasons: dict[str, str]


def find_facts(experiment: Experiment, training: Training, paths: SamplerPaths) -> Facts:
    """Return the facts of a training whose steps have run."""
    step = training.step
    return Facts(
        training.model,
        paths.by_layer,
        step.norm_plan,
        count_model_flops(experiment, step.module),
        paths.reasons | step.reasons,
    )


class Traced(NamedTuple):
    """A training that was traced: its set-up, its first step, and one like every later one."""

    recording: Recording
    facts: Facts
    births: Mapping[CodeType, Component]
    target: Target | None
    from_blocks: str  # which blocks were traced, and why not fewer
    further_batches: int  # accumulated ones that were not traced

    @property
    def first(self) -> MemoryTimeline:
        """The first step."""
        return MemoryTimeline(self.recording, self.births, self.recording.marks[:2])

    @property
    def steady(self) -> MemoryTimeline:
        """A later step."""
        window = self.recording.marks[2:]
        return MemoryTimeline(self.recording, self.births, window, self.further_batches)


def trace_whole(
    experiment: Experiment, enter: Enter, why: str = "", *, describing: bool = True
) -> Traced:
    """Set up a training under fake tensors, and record two steps.

    ``why`` says why not fewer blocks are traced. With ``describing`` calls are described where that
    is needed.

    Raises:
        UnsupportedError: The device is a GPU without a known target.
    """
    method = import_method(experiment)
    target = find_target(experiment)
    marks: list[int] = []
    counts_on_device = experiment.execution == "graph" or experiment.optimizer == "adamw-fused"
    batches = min(experiment.accumulation, _BATCHES)
    further = experiment.accumulation - batches
    with (
        fake_ranks(experiment.world_size),
        tracing(target, counts_on_device=counts_on_device) as recorder,
    ):
        recorder.describing &= describing
        recorder.launches = []
        few = experiment.model_copy(update={"accumulation": batches})
        training = set_up_fake(few, method, recorder, target)
        timeline_recorder = TimelineRecorder(recorder, training.step, enter)
        for is_last in (False, True):
            marks.append(len(recorder.events))
            timeline_recorder.run(training.batch, counting=is_last)
            marks.append(len(recorder.events))
    first, first_end, steady, end = marks
    return Traced(
        Recording(
            recorder.storages,
            sort_frees(recorder.events, {*marks, *around_launches(recorder.launches)}),
            (first, first_end, steady, end),
            dict(recorder.notes),
            recorder.block_bytes,
            recorder.launches,
            recorder.workspaces,
            is_graph=experiment.execution == "graph",
        ),
        find_facts(experiment, training, timeline_recorder.paths),
        components_by_code(training.step.births),
        target,
        why,
        further,
    )


def set_up_fake(
    experiment: Experiment,
    method: type[TrainingStep],
    recorder: Recorder,
    target: Target | None,
) -> Training:
    """Set a training up under fake tensors; a simulated GPU gets the model once it is built."""
    recorder.recording = target is None

    def load(moment: str, holders: TensorHolders) -> None:
        if moment == "model_loaded":
            recorder.load(holders.module)

    return set_up(experiment, method, torch.device("cpu"), load)


def state_estimate(traced: Traced, experiment: Experiment) -> Measurement:
    """Build the measurement of a traced training."""
    steady, target = traced.steady, traced.target
    allocator = None
    if target is not None:
        limit = int(experiment.memory_limit_bytes or target.memory_bytes)
        allocator = Footprint.of(traced.recording).simulate(limit)
    memory = state_memory(experiment, traced.first, steady, None, real=False, allocator=allocator)
    if traced.recording.is_graph:
        memory.assumed["graph"] = _GRAPH
    price = None if target is None else target.price_of(experiment.dtype)
    if price:
        memory.assumed[experiment.dtype] = price
    if experiment.keep_logits:
        memory.assumed["logits"] = KEPT_LOGITS
    if traced.further_batches:
        memory.assumed["accumulation"] = (
            f"{_BATCHES} batches were traced; the second stands for {traced.further_batches} more"
        )
    if traced.from_blocks:
        memory.assumed["blocks"] = traced.from_blocks
    return state(experiment, traced.facts, steady, memory=memory, ceilings=target)


def find_target(experiment: Experiment) -> Target | None:
    """Return the target, else that of the device; None for this machine's CPU.

    Raises:
        UnsupportedError: The device is a GPU without a known target.
    """
    target = experiment.target
    if isinstance(target, Target):
        return target
    if target is not None:
        named = registry.load("targets", target)
        if not (named is None or isinstance(named, Target)):
            raise EntryPointError(
                "targets", target, "is no dpprof.experiments.config.target.Target"
            )
        return named
    if experiment.device == CPU_TARGET:
        return None
    name = next((gpu.name for gpu in visible_gpus()), None)
    datasheet = find_by_device_name(name)
    if datasheet is None:
        raise UnsupportedError(
            f"the GPU {name} is not known; give a target, by name or as a mapping"
        )
    return datasheet


@contextmanager
def tracing(target: Target | None, *, counts_on_device: bool = False) -> Iterator[Recorder]:
    """Record fake tensors within, as if they were on a target.

    Without a target they are on this machine's CPU. ``counts_on_device`` says whether the optimizer
    counts its steps on the GPU.
    """
    with ExitStack() as within:
        call = FakeOperators(within.enter_context(fake_tensors()))
        if target is None:
            recorder = record_cpu(call)
            recorder.describing = True  # what is predicted here rests on calls that are timed
        else:
            processors = None
            if target.multiprocessors:
                processors = Processors.of(target.multiprocessors, target.compute_capability)
            notes = within.enter_context(simulated_cuda.like_cuda(target.compute_capability))
            recorder = Recorder(
                block_bytes=MIN_BLOCK,
                is_there=partial(simulated_cuda.is_on_device, counts_too=counts_on_device),
                call=call,
                workspaces=cuda_workspaces(processors),
            )
            recorder.notes = notes
            recorder.handles = simulated_cuda.library_workspaces(
                target.compute_capability, "forward", "backward"
            )
        within.enter_context(recorder)
        yield recorder


def state(
    experiment: Experiment,
    facts: Facts,
    steady: MemoryTimeline,
    *,
    memory: Memory,
    ceilings: Target | None,
) -> Measurement:
    """Build the measurement from the timeline of a step in the steady state."""
    compute = state_compute(experiment, facts.model_flops, steady, ceilings)
    assert memory.timeline is not None
    not_run = {} if memory.timeline.elapsed_s else _NOT_RUN
    predicted = {f"memory.{name}" for name, value in memory if value is not None}
    unknown = {name: why for name, why in _NOT_KNOWN.items() if name not in predicted}
    time = None
    if not_run:
        del unknown["time"]
        time, why_not = predict_time(steady.ops, experiment, ceilings)
        unknown |= why_not
    return Measurement(
        model=facts.model,
        samplers=facts.samplers,
        norm_plan=facts.norm_plan,
        memory=memory,
        compute=compute,
        time=time,
        io=state_io(steady, compute.executed_flops),
        communication=state_communication(steady, experiment.parallel),
        reasons=unknown | not_run | facts.reasons,
    )
