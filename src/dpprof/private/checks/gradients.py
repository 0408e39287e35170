"""Per-sample gradients of a user's loss by definition, and the known mistakes in a wrong one.

Shape legend: B samples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpprof.private.checks.batch import TrainingBatch
from dpprof.private.checks.draws import Replay
from dpprof.private.checks.loop import Gradients, Loop, Mechanism, WrongScaleError
from dpprof.private.samples.company import WrongTrainingError
from dpprof.private.substitutes import substitute

_EPSILON = 1e-6
"""What Opacus and dpprof add to the norm."""

_RTOL = 1e-2
"""How much losses that are the same may differ by rounding."""

_ALONE = 0.1
"""A parameter is compared with its own gradient, or with this part of the whole."""

Groups = Sequence[tuple[Sequence[nn.Parameter], float]]


class Samples(NamedTuple):
    """The losses of samples, (B,) float64, and their gradients, samples first."""

    losses_B: Tensor
    gradients: Gradients

    def norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Compute the samples' norms over some parameters; (B,) float64."""
        own = [self.gradients[p].reshape(len(self.losses_B), -1).norm(dim=1) for p in parameters]
        norms_B: Tensor = torch.stack([one.cpu().double() for one in own]).norm(dim=0)
        return norms_B


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


def take_alone(loop: Loop, batch: TrainingBatch) -> tuple[Samples | None, str | None]:
    """Compute the gradient of each sample in a batch of its own, by ordinary autograd.

    Returns:
        The samples; and the reason why they may rightly be others than in the batch, if there is
        one. Where that made a sample fail alone, there are none.

    Raises:
        WrongTrainingError: A sample fails alone without such a reason.
    """
    reason, found, draws = _find_reason(loop, batch), [], loop.draws
    each = _count_in_turn(loop, batch)
    with loop.plain() as model:
        for at in range(batch.samples):
            own = draws if each is None else draws.of_turn(at, each)
            # Also while it is differentiated, for checkpointing.
            with substitute(loop, "draws", own), loop.drawing(at, is_alone=True) as replay:
                try:
                    loss = read_losses(batch.take([at]).call(loop.loss, model), 1).sum()
                except Exception as error:
                    if reason := reason or _find_missed(replay):
                        return None, reason
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    # The whole batch does not raise it.
                    why = (
                        f"the loss of a sample alone raises {type(error).__name__}: the model or "
                        "the loss mixes samples"
                    )
                    raise WrongTrainingError(
                        find_part_of_all(loop, batch) or why, f"sample {at}: {error}"
                    ) from None
                found.append(_differentiate(loop, loss))
            _refuse_mixed_draws(replay, at)
            reason = reason or _find_missed(replay)
    return _gather(loop, found), reason


def _count_in_turn(loop: Loop, batch: TrainingBatch) -> int | None:
    """Count the draws of a sample, if the loss draws for one after the other; None if not."""
    made = len(loop.draws.made)
    if not made:
        return None
    with loop.plain() as model, torch.no_grad(), loop.drawing(0, is_alone=True) as replay:
        try:
            batch.take([0]).call(loop.loss, model)
        except Exception:  # noqa: BLE001 (what it raises is read later)
            return None
    return replay.asked if replay.asked * batch.samples == made else None


def _find_reason(loop: Loop, batch: TrainingBatch) -> str | None:
    if batch.whole:
        return f"{batch.whole[0]} has no entry for each sample, and belongs to the whole batch"
    if loop.draws.elsewhere is not None:
        return "the loss draws numbers with NumPy or Python, which are not those of one sample"
    return None


def _find_missed(replay: Replay) -> str | None:
    missed = replay.missed
    return missed and f"the loss draws numbers that are not those of one sample, by {missed}"


def _refuse_mixed_draws(replay: Replay, at: int) -> None:
    if replay.mixes is not None:
        raise WrongTrainingError(
            f"what is drawn for a sample by {replay.mixes} depends on other samples: the model or "
            "the loss mixes samples",
            f"sample {at}",
        )


def take_together(loop: Loop, batch: TrainingBatch) -> Samples | None:
    """Compute the gradient of each sample's loss in the whole batch; None if losses are one."""
    with loop.plain() as model, loop.drawing():
        losses = read_losses(batch.call(loop.loss, model), batch.samples)
        if not losses.dim():
            return None
        return _gather(loop, [_differentiate(loop, one, retain_graph=True) for one in losses])


def find_part_of_all(loop: Loop, batch: TrainingBatch) -> str | None:
    """Say which part of the batch the losses need whole, though it has an entry for each sample."""
    split, found = batch.split, None
    if len(split) < 2:  # noqa: PLR2004 (one has the samples)
        return None
    with loop.plain() as model, torch.no_grad():
        with loop.drawing():
            losses = read_losses(batch.call(loop.loss, model), batch.samples)

        def is_right(at: int, whole: Any) -> bool:
            try:
                with loop.drawing(at, is_alone=True):
                    alone = batch.take([at], whole).call(loop.loss, model)
                loss = read_losses(alone, 1).sum()
            except Exception:  # noqa: BLE001 (any loss may fail in any way)
                return False
            return bool(_is_close(loss, losses[at], _RTOL))

        if losses.dim():
            rows = range(batch.samples)
            whole = (path for path, one in split.items() if all(is_right(at, one) for at in rows))
            found = next(whole, None)
    return found and (
        f"each sample's loss depends on all {batch.samples} entries of {found}: the model or the "
        "loss mixes samples, or these are no samples; then give a batch of another size"
    )


def compare_company(loop: Loop, batch: TrainingBatch, samples: Samples, limit: float) -> str | None:
    """Compare each sample's loss and gradient with those among copies of it, with the same draws.

    Returns:
        Why that shows nothing; None if it does.

    Raises:
        WrongTrainingError: A loss or its gradient depends on the other samples.
    """
    for at in range(batch.samples):
        company = batch.take([at] * batch.samples)
        with loop.plain() as model, loop.drawing(at) as replay:
            losses = read_losses(company.call(loop.loss, model), batch.samples)
            found, gradients = _differentiate(loop, losses[at])
        if replay.missed is not None:
            return _find_missed(replay)
        _refuse_mixed_draws(replay, at)
        expected = samples.losses_B[at]
        own = {parameter: one[at] for parameter, one in samples.gradients.items()}
        is_close = bool(_is_close(torch.tensor(found), expected, limit))
        if not is_close or find_difference(gradients, own, limit)[0] is not None:
            what = "loss with another gradient" if is_close else "loss"
            raise WrongTrainingError(
                f"a sample has another {what} in the batch than among copies of itself, with the "
                "same draws: the model or the loss mixes samples",
                f"the loss of sample {at} is {expected:.6g} in the batch and {found:.6g} there",
            )
    return None


def _differentiate(
    loop: Loop, loss: Tensor, *, retain_graph: bool = False
) -> tuple[float, Gradients]:
    if not loss.requires_grad:
        raise WrongTrainingError(
            "the loss depends on no trained parameter; a frozen model under reentrant "
            "checkpointing needs enable_input_require_grads()"
        )
    return float(loss.detach()), loop.differentiate(loss, retain_graph=retain_graph)


def _gather(loop: Loop, found: Sequence[tuple[float, Gradients]]) -> Samples:
    losses_B = torch.tensor([loss for loss, _ in found], dtype=torch.float64)
    return Samples(
        losses_B, {p: torch.stack([own.pop(p) for _, own in found]) for p in loop.trained}
    )


def clip(
    samples: Samples,
    groups: Groups,
    divisor: float,
    *,
    scale: float = 1.0,
    stability: float | None = None,
) -> Gradients:
    """Compute the sum of clipped gradients over a divisor; ``scale`` multiplies each before.

    ``stability`` is that of normalised clipping.
    """
    sums = {}
    for parameters, bound in groups:
        norms_B = scale * samples.norms(parameters)
        if stability is None:
            factors_B = (bound / (norms_B + _EPSILON)).clamp(max=1.0)
        else:
            factors_B = bound / (norms_B + stability)
        factors_B = scale * factors_B / divisor
        for parameter in parameters:
            own = samples.gradients[parameter]
            sums[parameter] = torch.tensordot(factors_B.to(own), own, dims=1)
    return sums


def norm_of(gradients: Gradients) -> float:
    """Compute the norm of all gradients."""
    return math.hypot(*(float(one.norm()) for one in gradients.values()))


def find_difference(
    given: Gradients, expected: Gradients, limit: float
) -> tuple[nn.Parameter | None, float]:
    """Return the first parameter that differs, or None, and the largest relative error."""
    whole = norm_of(expected)
    worst, first = 0.0, None
    for parameter, one in expected.items():
        found, own = given[parameter], float(one.norm())
        error = float((found - one).norm())
        is_lost = own > limit**2 * whole and not found.any()
        if is_lost or not error <= limit * max(own, _ALONE * whole):
            first = parameter if first is None else first
        worst = max(worst, error / max(own, _ALONE * whole) if whole else error)
    return first, worst


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
            at = int(is_wrong_B.long().argmax())
            raise WrongTrainingError(
                f"{loop.names[parameter]}: the gradient of a sample has another norm by definition "
                f"than as it is clipped: {reason}",
                f"sample {at}: {own_B[at]:.6g} by definition, and {found_B[at]:.6g}",
            )


def diagnose(loop: Loop, samples: Samples, given: Gradients, limit: float) -> str | None:
    """Return the known mistake that explains a wrong gradient; None if there is none."""
    for wrong, reason in _mistakes(loop, samples):
        if norm_of(wrong) and find_difference(given, wrong, limit)[0] is None:
            return reason
    return None


def _mistakes(loop: Loop, samples: Samples) -> Iterator[tuple[Gradients, str]]:
    count, groups, divisor = len(samples.losses_B), loop.groups, loop.divisor
    clip_as_set = partial(clip, stability=loop.stability)
    unclipped = [(parameters, math.inf) for parameters, _ in groups]
    bound = math.hypot(*(one for _, one in groups))
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
        others = [(parameters, factor * one) for parameters, one in groups]
        reason = (
            f"samples are clipped to a bound of {factor * bound:g}, and the noise is for one of "
            f"{bound:g}"
        )
        yield clip_as_set(samples, others, divisor), reason
    for by, how in ((1.0, "not divided"), (divisor**2, "divided twice")):
        reason = f"the sum of clipped gradients is {how} by the expected batch size, {divisor:g}"
        yield clip_as_set(samples, groups, by), reason


def find_shared_layer(loop: Loop, batch: TrainingBatch) -> str | None:
    """Return the first trained layer whose output has not one entry for each sample, and why.

    Single samples by hand need none.
    """
    if isinstance(loop.private, Mechanism):
        return None
    count = batch.samples
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() and len(output) != count:
                seen.append(
                    f"{name}: this layer sees {len(output)} in the place of {count} samples, so it "
                    "has no gradient of each; give the model one entry a sample, such as position "
                    "ids of shape (B, T)"
                )

        return look

    with ExitStack() as hooks, loop.plain() as model:
        for name, layer in loop.model.named_modules():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                hooks.enter_context(layer.register_forward_hook(watch(name)))
        hooks.enter_context(loop.drawing())
        batch.call(loop.loss, model)
    return seen[0] if seen else None


def compare_losses(found: Tensor, alone_B: Tensor, limit: float, *, averages: bool) -> None:
    """Compare the losses of a batch with those of its samples alone; float64.

    Args:
        found: Of each sample, (B,), or their mean or sum.
        alone_B: Of each sample alone.
        limit: The largest relative error.
        averages: Whether one loss should be the mean.
    """
    count, mean, total = len(alone_B), alone_B.mean(), alone_B.sum()
    twice = "the mean over the batch is taken twice"
    if found.dim():
        expected = alone_B
        share = "each sample's loss in the batch is"
        mistakes: tuple[tuple[Tensor, str], ...] = (
            (alone_B / count, f"{share} 1/{count} of its loss alone: {twice}"),
            (
                alone_B * count,
                f"{share} {count} times its loss alone: it depends on the size of the batch",
            ),
        )
        at = int((~_is_close(found, alone_B, limit)).long().argmax())
        why = "the model or the loss mixes samples"
        otherwise = (
            f"a sample alone has another loss than in the batch: {why}",
            f"the loss of sample {at} is {alone_B[at]:.6g} alone and {found[at]:.6g} in the batch",
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
            f"the loss is {found:.6g}, and the mean {mean:.6g}",
        )
    if _is_close(found, expected, limit).all():
        return
    for wrong, reason in mistakes:
        if _is_close(found, wrong, limit).all():
            raise WrongScaleError(reason)
    raise WrongTrainingError(*otherwise)


def _is_close(found: Tensor, expected: Tensor, limit: float) -> Tensor:
    return (found - expected).abs() <= limit * expected.abs() + 1e-12
