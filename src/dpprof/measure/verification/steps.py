"""Runs steps of a method on a copy of a model, and compares their results with its declarations."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.mechanisms import FLAT, NO_CLIPPING
from dpprof.experiments.records.verdict import TOLERANCE
from dpprof.measure.verification.reference import PlacedGroup
from dpprof.measure.verification.subjects import Subject
from dpprof.subjects.methods.training_step import Batch, TrainingStep

STEPS = 2  # more than one, because a step must not affect the next


class WrongError(Exception):
    """A method did something wrong; the message says what."""


class StepResult(NamedTuple):
    """The results of one step."""

    groups: list[PlacedGroup]
    gradient: Tensor  # the concatenated gradients of all trainable parameters
    norms: Tensor | None
    noise_bound: float

    @property
    def sensitivity(self) -> float | None:
        """How far one sample can move the sum, divided by the bound that scales the noise."""
        bounds = [group.bound for group in self.groups]
        return math.hypot(*bounds) / self.noise_bound if bounds else None


def begin_steps(
    method: type[TrainingStep],
    experiment: Experiment,
    model: nn.Module,
    *,
    lr: float = 0.0,
    thaw_as: nn.Module | None = None,
) -> TrainingStep:
    """Return a method applied to a copy of the model, with plain SGD.

    With a learning rate of zero no step changes a weight. Once the method is set up, the parameters
    are trained that ``thaw_as`` trains.
    """
    step = method(copy.deepcopy(model), experiment)
    if thaw_as is not None:
        for parameter, wanted in zip(step.module.parameters(), thaw_as.parameters(), strict=True):
            parameter.requires_grad_(wanted.requires_grad)
    step.attach_optimizer(SGD([p for p in step.module.parameters() if p.requires_grad], lr=lr))
    return step


def compute(step: TrainingStep, batch: Batch) -> None:
    """Compute a gradient, as ``TrainingStep.run`` does."""
    step.compute_gradient(batch, lambda _: None)


def look(step: TrainingStep) -> StepResult:
    """Return the results of a step.

    Raises:
        WrongError: A parameter has no gradient, or the groups are impossible.
    """
    trainable = [p for p in step.module.parameters() if p.requires_grad]
    groups = _place_groups(step, trainable)
    missing = sum(parameter.grad is None for parameter in trainable)
    if missing:
        raise WrongError(f"{missing} of {len(trainable)} parameters have no gradient")
    gradient = torch.cat([p.grad.flatten() for p in trainable if p.grad is not None])
    return StepResult(groups, gradient.clone(), step.sample_norms(), step.noise_bound())


def finish(step: TrainingStep) -> None:
    """End the step, as ``TrainingStep.run`` does."""
    step.apply_gradient()
    step.optimizer.zero_grad()


def take_steps(method: type[TrainingStep], subject: Subject) -> Iterator[StepResult]:
    """Run ``STEPS`` steps that change no weight."""
    step = begin_steps(method, subject.experiment, subject.model)
    for _ in range(STEPS):
        compute(step, subject.batch)
        yield look(step)
        finish(step)


def _place_groups(step: TrainingStep, trainable: Sequence[nn.Parameter]) -> list[PlacedGroup]:
    position = {id(parameter): index for index, parameter in enumerate(trainable)}
    clipped = step.clip_groups()
    if any(id(parameter) not in position for group in clipped for parameter in group.parameters):
        raise WrongError("its groups clip parameters that are not trained")
    groups = [
        PlacedGroup([position[id(p)] for p in group.parameters], float(group.bound), group.epsilon)
        for group in clipped
    ]
    placed = sorted(index for group in groups for index in group.positions)
    if groups and placed != list(range(len(trainable))):
        raise WrongError("its groups do not clip every trainable parameter once")
    if any(group.epsilon < 0 for group in groups):
        raise WrongError("its groups have a negative epsilon")
    return groups


def complain_of_mechanism(method: type[TrainingStep], taken: StepResult) -> str | None:
    """Return how a step's groups contradict the method's declarations; None if they do not."""
    name, declared, sensitivity = method.mechanism, method.sensitivity, taken.sensitivity
    if sensitivity is None:
        return None if name == NO_CLIPPING else f"it declares {name}, and clips nothing"
    if name == NO_CLIPPING:
        return "it clips, and declares no mechanism"
    if name == FLAT and len(taken.groups) > 1:
        return f"it declares {FLAT}, and clips {len(taken.groups)} groups"
    is_stated = name != FLAT and "sensitivity" in (method.__doc__ or "").lower()
    if declared > 1 and not is_stated:
        return (
            f"it declares a sensitivity of {declared:g}, which takes a mechanism of another name "
            "and a docstring that states the sensitivity"
        )
    if not sensitivity <= declared * (1 + TOLERANCE):
        return f"one sample can move the sum by {sensitivity:.2f} C, and it declares {declared:g} C"
    return None
