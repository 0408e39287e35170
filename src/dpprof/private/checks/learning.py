"""Finds what keeps a private training from learning, by its settings and by public samples.

Shape legend: B samples, T tokens, V tokens in the vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.private.checks.batch import TrainingBatch
from dpprof.private.checks.effects import find_resting
from dpprof.private.checks.gradients import (
    Samples,
    clip,
    read_losses,
    take_alone,
    take_together,
)
from dpprof.private.checks.loop import Loop
from dpprof.private.norms.complex_numbers import as_real

_FEWEST = 8  # with fewer samples the length of their mean tells little
STEPS = 1_000  # the length of a training whose length is not known
_CERTAIN = 3.0  # standard deviations by which the signal may be longer than it looks in few samples
_FAR = 10  # how many times C every gradient is, where hardly anything is left of them


def find_obstacles(loop: Loop, batch: TrainingBatch | None) -> tuple[str, ...]:
    """Return what keeps a training from learning, a sentence each; maybe of public samples."""
    sentences = list(find_by_settings(loop.model))
    if (resting := find_resting(loop)) is not None:
        sentences.append(f"the learning rate of {resting} is 0")
    if batch is None:
        return tuple(sentences)
    zeros = [p for p in loop.trained if not p.any()]
    with loop.quiet():
        with torch.no_grad():
            for parameter in zeros:  # quiet fills them
                parameter.zero_()
        samples = take_together(loop, batch) or take_alone(loop, batch)[0]
        shifted = _find_shift(loop, batch)
    judged = () if samples is None else chain(_judge_bound(loop, samples), _judge(loop, samples))
    return (*sentences, *judged, *filter(None, [shifted]))


def find_by_settings(model: nn.Module) -> Iterator[str]:
    """Yield the sentence of a frozen matrix of zeros, such as an adapter's second one."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.requires_grad and not parameter.any():
            yield f"{name} is zero and frozen, so what it is multiplied with learns nothing"
            return


def _judge_bound(loop: Loop, samples: Samples) -> Iterator[str]:
    """Yield the sentence of a bound that clips no sample, or every one to nearly nothing."""
    if loop.settings.factor.get("stability") is not None:
        return
    for parameters, bound in loop.settings.groups:
        norms_B = samples.norms(parameters)
        least, most = float(norms_B.min()), float(norms_B.max())
        if 0 < most < bound:
            yield (
                f"no sample is clipped: norms are {most:.3g} at most, and noise is for a bound of "
                f"{bound:g}, {bound / most:.3g} times as much as a bound of {most:.3g} needs"
            )
        if least > _FAR * bound:
            yield (
                f"every sample is clipped to less than a tenth: norms are {least:.3g} at least, "
                f"and the bound is {bound:g}; steps of SGD are as much shorter"
            )


def _judge(loop: Loop, samples: Samples) -> Iterator[str]:
    """Yield the sentences of parameters that stay zero, and of a signal far below the noise."""
    for parameter, gradient in samples.gradients.items():
        if parameter.dim() > 1 and not parameter.any() and not gradient.any():
            name = loop.names[parameter]
            yield f"{name} is zero, and so is its gradient, so nothing but noise moves it"
    private: Any = loop.private
    count = len(samples.losses_B)
    deviation = loop.settings.noise * loop.settings.divisor / private.expected_batch_size
    noise = deviation * math.sqrt(sum(p.numel() for p in loop.trained))
    if not noise or count < _FEWEST or loop.settings.is_correlated:
        return
    most = _bound_signal(loop, samples)
    steps = getattr(private, "planned_steps", None) or STEPS
    if 0 < most * math.sqrt(steps) < noise:
        yield (
            f"the signal is far below the noise: the mean clipped gradient is {most:.2g} at most, "
            f"and the noise of a step {noise:.2g}, so signals add up to as much after "
            f"{(noise / most) ** 2:,.0f} steps at the earliest; train fewer parameters, or draw "
            "larger batches"
        )


def _bound_signal(loop: Loop, samples: Samples) -> float:
    """Return what the norm of the mean clipped gradient of all data hardly exceeds.

    By the products of distinct pairs alone (a U-statistic, with its deviation by Hoeffding): a mean
    of few samples is long although they have nothing in common.
    """
    settings, count = loop.settings, len(samples.losses_B)
    clipped = (
        clip(samples.at([place]), settings.groups, 1.0, **settings.factor) for place in range(count)
    )
    rows_BP = torch.stack(
        [torch.cat([as_real(g).flatten() for g in own.values()]) for own in clipped]
    )
    products_BB = (rows_BP @ rows_BP.mT).double().fill_diagonal_(0.0)
    means_B, pairs = products_BB.sum(1) / (count - 1), count * (count - 1)
    mean = means_B.mean()
    rest_BB = (products_BB - means_B - means_B[:, None] + mean).fill_diagonal_(0.0)
    variance = 4 * means_B.var() / count + 2 * rest_BB.square().sum() / pairs**2
    return math.sqrt(max(0.0, float(mean + _CERTAIN * variance.sqrt())))


def _find_shift(loop: Loop, batch: TrainingBatch) -> str | None:
    """Say whether each label is its token, or the one after the next, by gradients of logits."""
    seen: dict[str, list[Any]] = {"tokens": [], "logits": []}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Embedding) and inputs:
            seen["tokens"].append((module.num_embeddings, inputs[0]))
        if module is loop.model:
            seen["logits"].append(getattr(output, "logits", output))

    with ExitStack() as hooks, loop.plain() as model, loop.drawing():
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(look))
        losses = read_losses(batch.call(loop.loss, model), batch.samples)
        logits = seen["logits"][-1] if seen["logits"] else None
        if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.requires_grad:  # noqa: PLR2004 (B, T, V)
            return None
        gradient = torch.autograd.grad(losses.sum(), logits, allow_unused=True)[0]
    if gradient is None:
        return None
    for letters, tokens_BT in seen["tokens"]:
        for gradient_BTV in (gradient, gradient.transpose(1, 2)):
            if gradient_BTV.shape == (*tokens_BT.shape, letters):
                return _compare_labels(tokens_BT, gradient_BTV)
    return None


def _compare_labels(tokens_BT: Tensor, gradient_BTV: Tensor) -> str | None:
    labels_BT, counts_BT = gradient_BTV.argmin(2), gradient_BTV.any(2)

    def follow(shift: int) -> bool:
        length = tokens_BT.size(1) - shift
        labelled = counts_BT[:, :length]
        is_same = (labels_BT[:, :length] == tokens_BT[:, shift:]) | ~labelled
        return bool(labelled.any() and is_same.all())

    if follow(1):
        return None
    if follow(0):
        return "each token's label is the token itself, so the model learns to copy: shift labels"
    return "labels are shifted twice: each is the token after the next" if follow(2) else None
