"""The recorded memory of a small model's step."""

import functools
from collections.abc import Callable

import torch
from factory import make_experiment
from torch import nn

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Measurement
from dpprof.experiments.records.terms import COMPONENTS, Component
from dpprof.measure.instruments.memory import measure
from dpprof.predict.estimate import estimate
from dpprof.predict.flops.cost import COUNTED, Cost
from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.timeline import MemoryTimeline
from dpprof.predict.tracing import TimelineRecorder, record_timelines, tracing
from dpprof.subjects.batches import make_batch
from dpprof.subjects.setup import set_up

B, T, V, D = 3, 32, 50, 16
MODEL = {"vocab_size": V, "d_model": D, "layers": 2, "heads": 2}
BLOCK = 12 * D * D + 13 * D
P = V * D + T * D + 2 * BLOCK + 2 * D + D * V


def keep(
    method: str,
    build: Callable[[], nn.Module] | None = None,
    *,
    fake: bool = False,
    run: Callable[[Callable[[], None]], object] | None = None,
    **fields,
) -> MemoryTimeline:
    """Record the second step of the small model, or of any other.

    Args:
        method: The method.
        build: Makes another model.
        fake: Whether tensors are fake.
        run: Called with one more step, which is not recorded.
        fields: Of the experiment.
    """
    experiment = make_experiment(
        **{"model": MODEL, "method": method, "batch_size": B, "seq_len": T}
        | {"noise_multiplier": 0.1}  # more, and adaptive clipping would ask for more samples
        | fields
    )
    kind = registry.load("methods", method)
    real = Recorder(is_there=lambda tensor, _: not tensor.is_meta, workspaces=CPU_WORKSPACES)
    with tracing(None) if fake else real as recorder:
        if build is None:
            step, batch, _ = set_up(experiment, kind, torch.device("cpu"), lambda *_: None)
        else:
            model = build()
            step, batch = (
                kind(model, experiment),
                make_batch(model, torch.device("cpu"), experiment),
            )
            step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=0.1))
        timeline_recorder = TimelineRecorder(recorder, step, lambda _: None)
        kept = record_timelines(timeline_recorder, batch, 2)[1]
    if run is not None:
        run(lambda: step.run(batch, lambda _: None))
    return kept


keep_once = functools.cache(keep)
"""As ``keep``, recorded once for all tests that change nothing."""


def linears(width: int, layers: int) -> nn.Sequential:
    """Linear layers without bias on a looked-up input, which requires a gradient."""
    stack = (nn.Linear(width, width, bias=False) for _ in range(layers))
    return nn.Sequential(nn.Embedding(width, width), *stack)


def trace_call(target: str | None, run: Callable[[], object]) -> Recorder:
    """Record some operators on fake tensors, counted, as if they ran on a target."""
    with tracing(target and registry.load("targets", target)) as recorder:
        recorder.counting = True
        run()
    return recorder


def workspaces(recorder: Recorder, op: str = "") -> list[int]:
    """List what kernels and libraries requested themselves."""
    taken = (one for one in recorder.storages if "workspace" in one.roles)
    return [one.requested for one in taken if one.op.endswith(op)]


def costs(recorder: Recorder) -> list[Cost]:
    return [event.cost for event in recorder.events if isinstance(event, Op)]


def executed(step: MemoryTimeline) -> int:
    return sum(op.cost.flops for op in step.ops if op.cost.family in COUNTED)


def at_peak(step: MemoryTimeline) -> dict[Component, int]:
    return dict(zip(COMPONENTS, step.balances[step.peak_row].tolist(), strict=True))


def at_end_of(step: MemoryTimeline, phase: str) -> dict[Component, int]:
    """Who owned what in the last instant of a phase."""
    row = max(row for row, entered in enumerate(step.phases) if entered == phase)
    return dict(zip(COMPONENTS, step.balances[row].tolist(), strict=True))


@functools.cache
def record_and_estimate(experiment: Experiment) -> tuple[Measurement, Measurement]:
    """Record a step and estimate it, once for all tests; what must be equal is compared."""
    real, fake = (run(experiment, lambda _: None) for run in (measure, estimate))
    for name in ("peak_allocated_bytes", "first_step_peak_allocated_bytes", "at_peak"):
        assert getattr(fake.memory, name) == getattr(real.memory, name)
    assert fake.model == real.model
    return real, fake
