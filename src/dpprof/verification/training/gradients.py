"""Per-sample gradients of a user's loss by definition, and the known mistakes in a wrong one.

Shape legend: B samples.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpprof.verification.training.loop import (
    Gradients,
    Loop,
    TrainingBatch,
    WrongTrainingError,
)

_EPSILON = 1e-6
"""What Opacus and dpprof add to the norm."""

_ALONE = 0.1
"""A parameter is compared with its own gradient, or with this part of the whole."""

Groups = Sequence[tuple[Sequence[nn.Parameter], float]]


class Sample(NamedTuple):
    """The loss and gradient of one sample in a batch of its own."""

    loss: float
    gradients: Gradients

    def norm(self, parameters: Sequence[nn.Parameter]) -> float:
        """Compute the norm over some parameters."""
        own = self.gradients
        return math.hypot(*(float(own[p].norm()) for p in parameters if p in own))


def read_losses(value: Any, count: int) -> Tensor:
    """Return the losses of a call: (B,), or the scalar of the whole batch."""
    if isinstance(value, DPTensorFastGradientClipping):
        value = value.loss_per_sample
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss must return a tensor or the loss of Opacus's criterion, and returned "
            f"{type(value).__name__}"
        )
    if value.dim() == 0 or value.shape == (count,):
        return value
    raise ValueError(
        f"loss must return one loss a sample, ({count},), or their mean, and returned "
        f"{tuple(value.shape)}; give Opacus's criterion shape=logits.shape for losses of tokens"
    )


def take_alone(loop: Loop, loss: Callable[..., Any], batch: TrainingBatch) -> list[Sample]:
    """Compute the gradient of each sample in a batch of its own, by ordinary autograd."""
    samples = []
    with loop.plain() as model:
        for at in range(batch.samples):
            try:
                one = read_losses(batch.pick(slice(at, at + 1)).call(loss, model), 1).sum()
            except ValueError as error:  # which the whole batch does not raise
                reason = f"sample {at} alone: {error}: the model or the loss mixes samples"
                raise WrongTrainingError(reason) from error
            if not one.requires_grad:
                raise WrongTrainingError(
                    "the loss depends on no trained parameter; a frozen model under reentrant "
                    "checkpointing needs enable_input_require_grads()"
                )
            samples.append(Sample(float(one.detach()), loop.differentiate(one)))
    return samples


def take_together(
    loop: Loop, loss: Callable[..., Any], batch: TrainingBatch
) -> list[Sample] | None:
    """Compute the gradient of each sample's loss in the whole batch; None if losses are one."""
    with loop.plain() as model:
        losses = read_losses(batch.call(loss, model), batch.samples)
        if not losses.dim():
            return None
        return [
            Sample(float(one.detach()), loop.differentiate(one, retain_graph=True))
            for one in losses
        ]


def clip(
    samples: Sequence[Sample], groups: Groups, divisor: float, *, scale: float = 1.0
) -> Gradients:
    """Compute the sum of clipped gradients over a divisor; ``scale`` multiplies each before."""
    sums = {p: torch.zeros_like(p) for parameters, _ in groups for p in parameters}
    for sample in samples:
        for parameters, bound in groups:
            norm = scale * sample.norm(parameters)
            factor = scale * min(1.0, bound / (norm + _EPSILON)) / divisor
            for parameter in parameters:
                if parameter in sample.gradients:
                    sums[parameter] += factor * sample.gradients[parameter]
    return sums


def norm_of(gradients: Mapping[nn.Parameter, Tensor]) -> float:
    """Compute the norm of all gradients."""
    return math.hypot(*(float(one.norm()) for one in gradients.values()))


def find_difference(
    given: Gradients, expected: Gradients, limit: float
) -> tuple[nn.Parameter | None, float]:
    """Return the first parameter that differs, or None, and the largest relative error."""
    whole = norm_of(expected)
    worst, first = 0.0, None
    for parameter, one in expected.items():
        found = given.get(parameter, torch.zeros_like(one))
        own = float(one.norm())
        error = float((found - one).norm())
        is_lost = own > limit**2 * whole and not found.any()
        if is_lost or not error <= limit * max(own, _ALONE * whole):
            first = parameter if first is None else first
        worst = max(worst, error / max(own, _ALONE * whole) if whole else error)
    return first, worst


def compare_norms(
    loop: Loop, samples: Sequence[Sample], squares: Gradients, limit: float, reason: str
) -> None:
    """Compare each sample's norm of each parameter, relative to the sample's whole norm."""
    for parameter in loop.trained:
        found_B = squares[parameter].clamp(min=0).sqrt() if parameter in squares else None
        for at, sample in enumerate(samples):
            own, found = sample.norm([parameter]), 0.0 if found_B is None else float(found_B[at])
            if not abs(found - own) <= limit * sample.norm(loop.trained):
                raise WrongTrainingError(
                    f"{loop.names[parameter]}: the gradient of sample {at} has norm {own:.6g} by "
                    f"definition and {found:.6g} as it is clipped: {reason}"
                )


def diagnose(loop: Loop, samples: Sequence[Sample], given: Gradients, limit: float) -> str | None:
    """Return the known mistake that explains a wrong gradient; None if there is none."""
    for wrong, reason in _mistakes(loop, samples):
        if norm_of(wrong) and find_difference(given, wrong, limit)[0] is None:
            return reason
    return None


def _mistakes(loop: Loop, samples: Sequence[Sample]) -> Iterator[tuple[Gradients, str]]:
    count, groups, divisor = len(samples), loop.groups, loop.divisor
    unclipped = [(parameters, math.inf) for parameters, _ in groups]
    bound = math.hypot(*(one for _, one in groups))
    for scale, share, why in (
        (1 / count, f"1/{count} of", "the mean over the batch is taken twice"),
        (count, f"{count} times", "the loss sums over the batch where a mean is expected"),
    ):
        reason = f"each sample's gradient is {share} its own before it is clipped: {why}"
        yield clip(samples, groups, divisor, scale=scale), reason
    yield clip(samples, unclipped, divisor), "no sample's gradient is clipped"
    yield clip(samples, unclipped, count), "no sample's gradient is clipped"
    for by in sorted({divisor, float(count), 1.0}):
        whole = Sample(0.0, clip(samples, unclipped, by))
        for after in {1.0, divisor}:
            yield (
                clip([whole], groups, after),
                "the gradient of the batch is clipped as a whole, and not that of each sample",
            )
    for factor in (2.0, 0.5, float(count), 1 / count):
        others = [(parameters, factor * one) for parameters, one in groups]
        reason = (
            f"samples are clipped to a bound of {factor * bound:g}, and the noise is for one of "
            f"{bound:g}"
        )
        yield clip(samples, others, divisor), reason
    for by, how in ((1.0, "not divided"), (divisor**2, "divided twice")):
        reason = f"the sum of clipped gradients is {how} by the expected batch size, {divisor:g}"
        yield clip(samples, groups, by), reason


def find_shared_layer(loop: Loop, loss: Callable[..., Any], batch: TrainingBatch) -> str | None:
    """Return the first trained layer whose output has not one entry for each sample, and why."""
    count = batch.samples
    seen: list[tuple[str, int]] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() and len(output) != count:
                seen.append((name, len(output)))

        return look

    handles = [
        layer.register_forward_hook(watch(name))
        for name, layer in loop.model.named_modules()
        if any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    try:
        with loop.plain() as model, torch.no_grad():
            batch.call(loss, model)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        return None
    name, entries = seen[0]
    return (
        f"{name}: this layer sees {entries} in the place of {count} samples, so it has no gradient "
        "of each; give the model one entry a sample, such as position ids of shape (B, T)"
    )


def compare_each(together_B: Tensor, alone_B: Tensor, limit: float) -> None:
    """Compare the samples' losses in the batch with their losses alone; float64."""
    if _is_close(together_B, alone_B, limit):
        return
    count = len(alone_B)
    for factor, reason in (
        (1 / count, f"1/{count} of its loss alone: the mean over the batch is taken twice"),
        (count, f"{count} times its loss alone: it depends on the size of the batch"),
    ):
        if _is_close(together_B, alone_B * factor, limit):
            raise WrongTrainingError(f"each sample's loss in the batch is {reason}")
    pairs = enumerate(zip(together_B, alone_B, strict=True))
    at = next(at for at, (one, other) in pairs if not _is_close(one, other, limit))
    raise WrongTrainingError(
        f"the loss of sample {at} is {alone_B[at]:.6g} alone and {together_B[at]:.6g} in the "
        "batch: the model or the loss mixes samples"
    )


def compare_whole(together: Tensor, alone_B: Tensor, limit: float, *, averages: bool) -> None:
    """Compare the batch's loss with the mean of its samples' losses, or their sum; float64."""
    mean, total, count = alone_B.mean(), alone_B.sum(), len(alone_B)
    if _is_close(together, mean if averages else total, limit):
        return
    if averages and _is_close(together, total, limit):
        raise WrongTrainingError("the loss sums over the batch, and the optimizer expects a mean")
    if not averages and _is_close(together, mean, limit):
        raise WrongTrainingError(
            "the loss is a mean over the batch, and the optimizer expects a sum"
        )
    if _is_close(together, mean / count, limit):
        raise WrongTrainingError(
            f"the loss is 1/{count} of the samples' mean: the mean over the batch is taken twice"
        )
    raise WrongTrainingError(
        f"the batch's loss is {together:.6g}, and the mean over its samples alone is {mean:.6g}: "
        "samples are mixed, or the mean is over all tokens of the batch"
    )


def compare_unclipped(
    loop: Loop, found: Gradients, samples: Sequence[Sample], divisor: float, limit: float
) -> None:
    """Compare the gradient of the batch's loss with those of its samples, all unclipped."""
    expected = clip(samples, [(loop.trained, math.inf)], divisor)
    first, _ = find_difference(found, expected, limit)
    if first is not None:
        raise WrongTrainingError(
            f"{loop.names[first]}: the gradient of the batch's loss is not that of its samples "
            "alone: samples are mixed, or the mean is over all tokens of the batch"
        )


def _is_close(found: Tensor, expected: Tensor, limit: float) -> bool:
    return bool(((found - expected).abs() <= limit * expected.abs() + 1e-12).all())
