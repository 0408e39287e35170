"""Scenarios in which a method can lose its guarantee although ordinary gradients are right.

A method may refuse a scenario by any exception, because then it applies no gradient. It must not
continue with a gradient other than the reference's: then ``WrongError`` is raised.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpprof.experiments.records.verdict import TOLERANCE, Scenario
from dpprof.measure.verification import reference, steps
from dpprof.measure.verification.subjects import Subject, choose_frozen, choose_layer
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.training_step import Batch, TrainingStep


def freeze_later(method: type[TrainingStep], subject: Subject) -> None:
    """Freeze parameters after set-up: they must not change, and the others' gradient is right."""
    step = steps.begin_steps(method, subject.experiment, subject.model, lr=1.0)
    parameters = [p for p in step.module.parameters() if p.requires_grad]
    frozen = choose_frozen(step.module)
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen]
    steps.compute(step, subject.batch)
    samples = zip(parameters, subject.samples, strict=True)
    _compare(method, steps.look(step), [g for parameter, g in samples if parameter.requires_grad])
    steps.finish(step)
    if not all(map(torch.equal, before, frozen)):
        raise steps.WrongError("the frozen parameters changed")


def thaw_later(method: type[TrainingStep], subject: Subject) -> None:
    """Thaw a layer after set-up: it must be clipped with the others."""
    model = copy.deepcopy(subject.model)
    choose_layer(model).requires_grad_(False)
    step = steps.begin_steps(method, subject.experiment, model, thaw_as=subject.model)
    steps.compute(step, subject.batch)
    _compare(method, steps.look(step), subject.samples)


def poison(method: type[TrainingStep], subject: Subject) -> None:
    """Make one sample's gradient infinite: only this sample must be left out.

    Raises:
        UnsupportedError: Other gradients would not be finite either, for example with tied weights.
    """
    model = copy.deepcopy(subject.model)
    batch = _poison_first(model, subject.batch)
    others = _sample_gradients(model, batch.map(lambda tensor: tensor[1:]))
    poisoned_sample = _sample_gradients(model, batch.map(lambda tensor: tensor[:1]))
    if _is_finite(poisoned_sample) or not _is_finite(others):
        raise UnsupportedError("no single sample of this model can be made non-finite")
    expected = [torch.cat([g.new_zeros(1, g.shape[1]), g]) for g in others]
    for taken in steps.take_steps(method, subject._replace(model=model, batch=batch)):
        _compare(method, taken, expected)


def _poison_first(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with infinite pixels, or an id whose row is infinite, in sample 0 alone."""
    if batch.x.is_floating_point():
        pixels = batch.x.clone()
        pixels[0] = torch.inf
        return replace(batch, x=pixels)
    table = next(layer for layer in model.modules() if isinstance(layer, nn.Embedding))
    poisoned = table.num_embeddings - 1
    with torch.no_grad():
        table.weight[poisoned] = torch.inf
    mask_BT = batch.mask_BT
    batch = replace(batch.map(lambda ids: ids.masked_fill(ids == poisoned, 0)), mask_BT=mask_BT)
    batch.x[0, 0] = poisoned
    return batch


def _sample_gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    return reference.sample_gradients(model, batch.inputs, batch.labels)


def empty(method: type[TrainingStep], subject: Subject) -> None:
    """Use a batch without samples: the gradient before noise must be zero."""
    batch = subject.batch.map(lambda ids: ids[:0])
    step = steps.begin_steps(method, subject.experiment, subject.model)
    steps.compute(step, batch)
    if not steps.look(step).gradient.eq(0).all():
        raise steps.WrongError("the gradient is not zero")


def accumulate(method: type[TrainingStep], subject: Subject) -> None:
    """Compute two gradients without clearing: the second or the sum of both must result."""
    experiment, model, batch, samples = subject
    second = make_batch(model, torch.device("cpu"), experiment)
    step = steps.begin_steps(method, experiment, model)
    steps.compute(step, batch)
    first = reference.clip_and_average(samples, steps.look(step).groups)
    steps.compute(step, second)
    taken = steps.look(step)
    last = reference.clip_and_average(_sample_gradients(model, second), taken.groups)
    if not any(_is_close(taken.gradient, expected) for expected in (last, first + last)):
        raise steps.WrongError("the gradient is neither the last nor the sum")


GUARANTEES: Mapping[Scenario, Callable[[type[TrainingStep], Subject], None]] = {
    "frozen later": freeze_later,
    "thawed later": thaw_later,
    "non-finite": poison,
    "empty": empty,
    "accumulated": accumulate,
}
"""Functions that raise an error unless the method is right."""


def _compare(
    method: type[TrainingStep], taken: steps.StepResult, samples: Sequence[Tensor]
) -> None:
    """Raise ``WrongError`` unless a step has the gradient and the mechanism that it should have."""
    if not taken.gradient.isfinite().all():
        raise steps.WrongError("the gradient is not finite")
    if not _is_close(taken.gradient, reference.clip_and_average(samples, taken.groups)):
        raise steps.WrongError("the gradient is not the reference's")
    if reason := steps.complain_of_mechanism(method, taken):
        raise steps.WrongError(reason)


def _is_close(computed: Tensor, expected: Tensor) -> bool:
    return bool((computed - expected).norm() <= TOLERANCE * expected.norm())


def _is_finite(samples: Sequence[Tensor]) -> bool:
    return all(bool(gradients.isfinite().all()) for gradients in samples)
