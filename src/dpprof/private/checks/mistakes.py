"""Names the known mistakes in the losses, norms and gradients of a user's loop.

Shape legend: B samples.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpprof.private.checks.batch import TrainingBatch
from dpprof.private.checks.gradients import Samples, clip, find_difference, is_close, norm_of
from dpprof.private.checks.loop import Gradients, Loop, WrongScaleError
from dpprof.private.checks.settings import Mechanism
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.samples.company import WrongTrainingError


def compare_losses(losses: Tensor, alone_B: Tensor, limit: float, *, averages: bool) -> None:
    """Compare losses, (B,), or their mean (``averages``) or sum, with those alone, (B,)."""
    count, mean, total = len(alone_B), alone_B.mean(), alone_B.sum()
    twice = "the mean over the batch is taken twice"
    if losses.dim():
        expected = alone_B
        share = "each sample's loss in the batch is"
        mistakes: tuple[tuple[Tensor, str], ...] = (
            (alone_B / count, f"{share} 1/{count} of its loss alone: {twice}"),
            (
                alone_B * count,
                f"{share} {count} times its loss alone: it depends on the size of the batch",
            ),
        )
        sample = int((~is_close(losses, alone_B, limit)).long().argmax())
        why = "the model or the loss mixes samples"
        alone, own = alone_B[sample], losses[sample]
        otherwise = (
            f"a sample alone has another loss than in the batch: {why}",
            f"the loss of sample {sample} is {alone:.6g} alone and {own:.6g} in the batch",
        )
    else:
        expected = mean if averages else total
        mistakes = (
            (total, "the loss sums over the batch, and the optimizer expects a mean"),
            (mean, "the loss is a mean over the batch, and the optimizer expects a sum"),
            (mean / count, f"the loss is 1/{count} of the samples' mean: {twice}"),
        )
        why = "samples are mixed, or the mean is over all tokens of the batch"
        otherwise = (
            f"the batch's loss is not the mean over its samples alone: {why}",
            f"the loss is {losses:.6g}, and the mean {mean:.6g}",
        )
    if is_close(losses, expected, limit).all():
        return
    for wrong, reason in mistakes:
        if is_close(losses, wrong, limit).all():
            raise WrongScaleError(reason)
    raise WrongTrainingError(*otherwise)


def compare_norms(
    loop: Loop, samples: Samples, squares: Gradients, limit: float, reason: str
) -> None:
    """Compare each sample's norm of each parameter, relative to the sample's whole norm."""
    whole_B = samples.norms(loop.trained)
    for parameter in loop.trained:
        own_B = samples.norms([parameter])
        found_B = squares.get(parameter, torch.zeros_like(own_B)).cpu().clamp(min=0).sqrt()
        is_wrong_B = ~((found_B - own_B).abs() <= limit * whole_B)
        if is_wrong_B.any():
            sample = int(is_wrong_B.long().argmax())
            raise WrongTrainingError(
                f"{loop.names[parameter]}: the gradient of a sample has another norm by definition "
                f"than as it is clipped: {reason}",
                f"sample {sample}: {own_B[sample]:.6g} by definition, and {found_B[sample]:.6g}",
            )


def diagnose(loop: Loop, samples: Samples, actual: Gradients, limit: float) -> str | None:
    """Return the known mistake that explains a wrong gradient; None if none does."""
    for wrong, reason in _mistakes(loop, samples):
        if norm_of(wrong) and find_difference(actual, wrong, limit)[0] is None:
            return reason
    return None


def _mistakes(loop: Loop, samples: Samples) -> Iterator[tuple[Gradients, str]]:
    """Yield the gradient that each known mistake gives, and its name."""
    count, groups, divisor = len(samples.losses_B), loop.settings.groups, loop.settings.divisor
    clip_as_set: Callable[..., Gradients] = partial(clip, **loop.settings.factor)
    unclipped = [(parameters, math.inf) for parameters, _ in groups]
    bound = math.hypot(*(limit for _, limit in groups))
    for scale, share, why in (
        (1 / count, f"1/{count} of", "the mean over the batch is taken twice"),
        (count, f"{count} times", "the loss sums over the batch where a mean is expected"),
    ):
        reason = f"each sample's gradient is {share} its own before it is clipped: {why}"
        yield clip_as_set(samples, groups, divisor, scale=scale), reason
    for by in (divisor, count):
        yield clip(samples, unclipped, by), "no sample's gradient is clipped"
    for by in sorted({divisor, float(count), 1.0}):
        batch = {p: total[None] for p, total in clip(samples, unclipped, by).items()}
        for after in {1.0, divisor}:
            yield (
                clip_as_set(Samples(samples.losses_B[:1], batch), groups, after),
                "the gradient of the batch is clipped as a whole, and not that of each sample",
            )
    for factor in (2.0, 0.5, float(count), 1 / count):
        others = [(parameters, factor * limit) for parameters, limit in groups]
        reason = (
            f"samples are clipped to a bound of {factor * bound:g}, and the noise is for one of "
            f"{bound:g}"
        )
        yield clip_as_set(samples, others, divisor), reason
    for by, how in ((1.0, "not divided"), (divisor**2, "divided twice")):
        reason = f"the sum of clipped gradients is {how} by the expected batch size, {divisor:g}"
        yield clip_as_set(samples, groups, by), reason


def find_shared_layer(loop: Loop, batch: TrainingBatch) -> str | None:
    """Return the first trained layer that gets indices for all samples at once, and why."""
    if isinstance(loop.private, Mechanism | NoisyOptimizer):  # which may have gradients of each
        return None
    count = batch.samples
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_layer: nn.Module, inputs: Any, _output: Any) -> None:
            indices = [x for x in inputs if isinstance(x, Tensor) and not x.is_floating_point()]
            if indices and indices[0].shape[:1] == (1,) and count > 1:
                seen.append(
                    f"{name}: this layer sees one entry for all {count} samples, so it has no "
                    "gradient of each; give the model one entry a sample, such as position ids of "
                    "shape (B, T)"
                )

        return look

    with ExitStack() as hooks, loop.plain() as model:
        for name, layer in loop.model.named_modules():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                hooks.enter_context(layer.register_forward_hook(watch(name)))
        hooks.enter_context(loop.drawing())
        batch.call(loop.loss, model)
    return seen[0] if seen else None


def refuse_other_loss(loop: Loop, value: Any) -> None:
    """Refuse the loss of adaptive clipping, and one that ghost clipping does not see."""
    if isinstance(value, DPTensorFastGradientClipping):
        if type(value) is not DPTensorFastGradientClipping:
            raise TypeError("adaptive clipping cannot be checked: its bound moves each step")
        return
    private = loop.private
    if isinstance(private, DPOptimizerFastGradientClipping) and not loop.by_hand:
        raise WrongTrainingError(
            "the loss is not that of the criterion that Opacus wrapped for ghost clipping, so "
            "no sample's gradient is clipped"
        )
