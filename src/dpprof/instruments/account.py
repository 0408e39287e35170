"""Instruments ``ledger`` and ``estimate``: every byte of a step, and what operators cost.

Both record from before the model exists, and keep the books of the first step and of one
in the steady state. ``ledger`` does so while it really runs; ``estimate`` runs the same
under fake tensors, which takes no memory and no device, for a target that need not exist.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from dpprof import catalogue
from dpprof.catalogue import UnsupportedError
from dpprof.closing import JOINED
from dpprof.datasheets import find_by_device_name
from dpprof.devices.cpu import Cpu
from dpprof.experiment import CPU_TARGET, Experiment
from dpprof.hardware import visible_gpus
from dpprof.instruments.samplers import SamplerPaths
from dpprof.instruments.setup import Training, begin, import_method, set_up
from dpprof.ledger import cuda
from dpprof.ledger.books import Step
from dpprof.ledger.evidence import Witness
from dpprof.ledger.fake import INSTEAD, fake_tensors
from dpprof.ledger.recorder import Recorder
from dpprof.ledger.statement import state_compute, state_io, state_memory
from dpprof.ledger.workspaces import CPU_WORKSPACES
from dpprof.methods.base import Enter, TrainingStep
from dpprof.result import Measurement
from dpprof.target import Target

ESTIMATED_STEPS = 2
"""The second step is like every later one: gradients and optimizer state are there."""

_NOT_KNOWN = {
    "memory.peak_reserved_bytes": "the ledger sees storages, not what the allocator reserves",
    "memory.peak_rss_bytes": "the instrument clean tells",
    "memory.peak_device_used_bytes": "the instrument clean tells",
    "memory.alloc_retries": "the instrument clean tells",
    "memory.snapshots": "the instrument phases takes them",
    "time": "the ledger would be in it; the instrument clean tells",
    "throughput": "the ledger would be in it; the instrument clean tells",
    "compute.mfu": JOINED,
    "compute.hfu": JOINED,
}
_NOT_RUN = {"memory.timeline.elapsed_s": "nothing ran, so no time went by"}


class Account(NamedTuple):
    """A training, and the books of its first step and of its last."""

    training: Training
    paths: SamplerPaths
    first: Step
    steady: Step


def keep_books(recorder: Recorder, training: Training, enter: Enter, steps: int) -> Account:
    """Run a number of steps, at least two, and keep the books of the first and the last."""
    paths = SamplerPaths()
    witness = Witness(recorder, training.step, training.batch, enter, paths)
    windows = []
    with witness.watching():
        for number in range(steps):
            recorder.counting = number == steps - 1
            start = len(recorder.events)
            training.step.run(training.batch, witness.enter)
            windows.append((start, len(recorder.events)))
    births = training.step.births
    first, steady = (Step(recorder, births, window) for window in (windows[0], windows[-1]))
    return Account(training, paths, first, steady)


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Keep the books of one experiment in this process.

    Args:
        experiment: What to run.
        enter: Called as each phase begins.
    """
    method, device = begin(experiment)
    on_cuda = device.torch_device.type == "cuda"
    recorder = Recorder(
        block_bytes=cuda.BLOCK_BYTES if on_cuda else 1,
        is_there=lambda tensor, _: tensor.device.type == device.torch_device.type,
        workspaces={} if on_cuda else CPU_WORKSPACES,
    )
    # On CUDA backward has a thread of its own, which no Python stack leads to.
    with torch.autograd.set_multithreading_enabled(False), recorder:
        training = set_up(experiment, method, device, lambda *_: None)
        device.reset_peaks()
        account = keep_books(recorder, training, enter, experiment.warmup_steps + 1)
    allocator_peak = device.peaks().allocated_bytes
    ceilings = find_by_device_name(torch.cuda.get_device_name()) if on_cuda else None
    return _describe(experiment, account, ceilings, allocator_peak, real=True)


def estimate(experiment: Experiment, enter: Enter) -> Measurement:
    """Predict one experiment, without the memory and the time that it would take.

    Args:
        experiment: What to predict.
        enter: Called as each phase begins.

    Raises:
        UnsupportedError: The device is a GPU that no target is known for.
    """
    method = import_method(experiment)
    target = find_target(experiment)
    with tracing(target) as recorder:
        account = trace(experiment, method, recorder, enter)
    return _describe(experiment, account, target, None, real=False)


def find_target(experiment: Experiment) -> Target | None:
    """Find what an estimate is for: the target, else the device; None for this machine's CPU.

    Raises:
        UnsupportedError: The device is a GPU that no target is known for.
    """
    target = experiment.target
    if isinstance(target, Target):
        return target
    if target is not None:
        named: Target | None = catalogue.load("targets", target)
        return named
    if experiment.device == CPU_TARGET:
        return None
    name = next((gpu.name for gpu in visible_gpus()), None)
    found = find_by_device_name(name)
    if found is None:
        raise UnsupportedError(
            f"nothing is known of the GPU {name}; give a target, by name or as a mapping"
        )
    return found


@contextmanager
def tracing(target: Target | None, choices: cuda.Choices = cuda.EVERYTHING) -> Iterator[Recorder]:
    """Record fake tensors within, as if on a target."""
    with ExitStack() as within:
        within.enter_context(fake_tensors())
        if target is None:
            recorder = Recorder(
                is_there=lambda tensor, _: not tensor.is_meta,
                instead=INSTEAD,
                workspaces=CPU_WORKSPACES,
            )
        else:
            within.enter_context(cuda.like_cuda(choices))
            recorder = Recorder(
                block_bytes=cuda.BLOCK_BYTES if choices.blocks else 1,
                is_there=cuda.is_on_device,
                instead=INSTEAD,
                workspaces=cuda.WORKSPACES if choices.workspaces else {},
            )
            if choices.libraries:
                for name, size in cuda.library_workspaces(target.compute_capability).items():
                    recorder.claim(size, name)
        within.enter_context(recorder)
        yield recorder


def trace(
    experiment: Experiment, method: type[TrainingStep], recorder: Recorder, enter: Enter
) -> Account:
    """Keep the books of fake steps, within ``tracing``."""
    training = set_up(experiment, method, Cpu(), lambda *_: None)
    return keep_books(recorder, training, enter, ESTIMATED_STEPS)


def _describe(
    experiment: Experiment,
    account: Account,
    ceilings: Target | None,
    allocator_peak: int | None,
    *,
    real: bool,
) -> Measurement:
    compute = state_compute(experiment, account.training.step.module, account.steady, ceilings)
    return Measurement(
        model=account.training.model,
        samplers=account.paths.by_layer,
        memory=state_memory(experiment, account.first, account.steady, allocator_peak, real=real),
        compute=compute,
        io=state_io(account.steady, compute.executed_flops),
        reasons=_NOT_KNOWN | ({} if real else _NOT_RUN) | account.paths.reasons,
    )
