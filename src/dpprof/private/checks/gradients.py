"""Computes per-sample gradients of a user's loss by definition, and compares gradients.

Shape legend: B samples.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpprof.private.checks.batch import TrainingBatch
from dpprof.private.checks.draws import Replay
from dpprof.private.checks.loop import Gradients, Loop
from dpprof.private.samples.batches import give
from dpprof.private.samples.company import LOSES_AXIS, Company, WrongTrainingError
from dpprof.private.samples.random_state import States
from dpprof.private.samples.users import Segments, verify_segments
from dpprof.private.substitutes import substitute

_EPSILON = 1e-6  # what Opacus and dpprof add to the norm
_RTOL = 1e-2  # how much rounding may change a loss
_ALONE = 0.1  # an error is relative to a parameter's gradient, or to this share of the whole one

Groups = Sequence[tuple[Sequence[nn.Parameter], float]]


class Samples(NamedTuple):
    """The losses of samples, (B,) float64, and their gradients, samples first."""

    losses_B: Tensor
    gradients: Gradients

    def norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Compute the samples' norms over some parameters; (B,) float64."""
        flat = (self.gradients[p].reshape(len(self.losses_B), -1) for p in parameters)
        norms_B: Tensor = torch.stack([g.norm(dim=1).cpu().double() for g in flat]).norm(dim=0)
        return norms_B

    def join(self, users: Segments | None) -> "Samples":
        """Return what users have, in place of their samples; all as it is where there are none."""
        if users is None:
            return self
        verify_segments(users, len(self.losses_B), least=2)
        joined = {parameter: users.join(own) for parameter, own in self.gradients.items()}
        return Samples(users.join(self.losses_B), joined)

    def at(self, places: list[int]) -> "Samples":
        """Return some of the samples."""
        return Samples(self.losses_B[places], {p: g[places] for p, g in self.gradients.items()})


def read_losses(value: Any, count: int) -> Tensor:
    """Return the losses of a call: (B,), or the scalar of the whole batch."""
    if isinstance(value, DPTensorFastGradientClipping):
        value = value.loss_per_sample
    if not isinstance(value, Tensor):
        raise TypeError(
            "loss must return a tensor, one loss for each sample, or the loss of Opacus's "
            f"criterion, and returned {type(value).__name__}"
        )
    if value.dim() == 0 or value.shape == (count,):
        return value
    raise ValueError(
        f"loss must return one loss a sample, ({count},), or their mean, and returned "
        f"{tuple(value.shape)}; average over what a sample has, such as tokens, or give Opacus's "
        "criterion shape=logits.shape"
    )


def take_alone(loop: Loop, batch: TrainingBatch) -> tuple[Samples | None, str | None]:
    """Compute the gradient of each sample in a batch of its own, by ordinary autograd.

    The reason why samples may rightly differ from those in the batch comes with them, if there
    is one; they are None where it made one fail alone. Without it a failure is a
    ``WrongTrainingError``.
    """
    reason, results, draws = _find_reason(loop, batch), [], loop.draws
    each = _count_in_turn(loop, batch)
    with loop.plain() as model:
        for sample in range(batch.samples):
            own = draws if each is None else draws.of_turn(sample, each)
            # Also while it is differentiated, for checkpointing.
            with substitute(loop, "draws", own), loop.drawing(sample, is_alone=True) as replay:
                try:
                    loss = read_losses(batch.take([sample]).call(loop.loss, model), 1).sum()
                except Exception as error:
                    if reason := reason or _find_missed(replay):
                        return None, reason
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    # The whole batch does not raise it.
                    why = (
                        f"the loss of a sample alone raises {type(error).__name__}: the model or "
                        f"the loss mixes samples, or {LOSES_AXIS}"
                    )
                    raise WrongTrainingError(
                        find_part_of_all(loop, batch) or why, f"sample {sample}: {error}"
                    ) from None
                results.append(_differentiate(loop, loss))
            _refuse_mixed_draws(replay, sample)
            reason = reason or _find_missed(replay)
    return _gather(loop, results), reason


def _count_in_turn(loop: Loop, batch: TrainingBatch) -> int | None:
    """Count the draws of a sample, if the loss draws for sample after sample; None if not."""
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


def _refuse_mixed_draws(replay: Replay, sample: int) -> None:
    if replay.mixes is not None:
        raise WrongTrainingError(
            f"what is drawn for a sample by {replay.mixes} depends on other samples: the model or "
            "the loss mixes samples",
            f"sample {sample}",
        )


def take_together(loop: Loop, batch: TrainingBatch) -> Samples | None:
    """Compute the gradient of each sample's loss in the whole batch; None if it has one loss."""
    with loop.plain() as model, loop.drawing():
        losses = read_losses(batch.call(loop.loss, model), batch.samples)
        if not losses.dim():
            return None
        return _gather(loop, [_differentiate(loop, loss, retain_graph=True) for loss in losses])


def find_part_of_all(loop: Loop, batch: TrainingBatch) -> str | None:
    """Say which part of the batch losses need whole, although it has an entry for each sample."""
    split, path = batch.split, None
    if len(split) < 2:  # noqa: PLR2004 (one has the samples)
        return None
    with loop.plain() as model, torch.no_grad():
        with loop.drawing():
            losses = read_losses(batch.call(loop.loss, model), batch.samples)

        def is_right(sample: int, whole: Any) -> bool:
            try:
                with loop.drawing(sample, is_alone=True):
                    alone = batch.take([sample], whole).call(loop.loss, model)
                loss = read_losses(alone, 1).sum()
            except Exception:  # noqa: BLE001 (any loss may fail in any way)
                return False
            return bool(is_close(loss, losses[sample], _RTOL))

        if losses.dim():
            for name, leaf in split.items():
                if all(is_right(sample, leaf) for sample in range(batch.samples)):
                    path = name
                    break
    return path and (
        f"each sample's loss depends on all {batch.samples} entries of {path}: the model or the "
        "loss mixes samples, or these are no samples; then give a batch of another size"
    )


def compare_company(loop: Loop, batch: TrainingBatch, samples: Samples, limit: float) -> str | None:
    """Compare each sample's loss and gradient with those among copies of it, with the same draws.

    Returns why that shows nothing; None if it does. ``WrongTrainingError``: one depends on others.
    """
    for sample in range(batch.samples):
        company = batch.take([sample] * batch.samples)
        with loop.plain() as model, loop.drawing(sample) as replay:
            losses = read_losses(company.call(loop.loss, model), batch.samples)
            loss, gradients = _differentiate(loop, losses[sample])
        if replay.missed is not None:
            return _find_missed(replay)
        _refuse_mixed_draws(replay, sample)
        expected = samples.losses_B[sample]
        own = {parameter: gradient[sample] for parameter, gradient in samples.gradients.items()}
        is_same_loss = bool(is_close(torch.tensor(loss), expected, limit))
        if not is_same_loss or find_difference(gradients, own, limit)[0] is not None:
            what = "loss with another gradient" if is_same_loss else "loss"
            raise WrongTrainingError(
                f"a sample has another {what} in the batch than among copies of itself, with the "
                "same draws: the model or the loss mixes samples",
                f"the loss of sample {sample} is {expected:.6g} in the batch and {loss:.6g} there",
            )
    return None


def _differentiate(
    loop: Loop, loss: Tensor, *, retain_graph: bool = False
) -> tuple[float, Gradients]:
    if not loss.requires_grad:
        raise WrongTrainingError(
            "the loss depends on no trained parameter; compute it of the model's outputs, without "
            "no_grad(), detach() or item(); a frozen model under reentrant checkpointing needs "
            "enable_input_require_grads()"
        )
    return float(loss.detach()), loop.differentiate(loss, retain_graph=retain_graph)


def _gather(loop: Loop, results: Sequence[tuple[float, Gradients]]) -> Samples:
    losses_B = torch.tensor([loss for loss, _ in results], dtype=torch.float64)
    return Samples(
        losses_B, {p: torch.stack([own.pop(p) for _, own in results]) for p in loop.trained}
    )


def clip(
    samples: Samples,
    groups: Groups,
    divisor: float,
    *,
    scale: float = 1.0,
    stability: float | None = None,
    psac: bool = False,
) -> Gradients:
    """Compute the sum of clipped gradients over a divisor; ``scale`` multiplies each before."""
    sums = {}
    for parameters, bound in groups:
        norms_B = scale * samples.norms(parameters)
        if stability is None:
            factors_B = (bound / (norms_B + _EPSILON)).clamp(max=1.0)
        else:
            added_B = stability / (norms_B + stability) if psac else stability
            factors_B = bound / (norms_B + added_B)
        factors_B = scale * factors_B / divisor
        for parameter in parameters:
            own = samples.gradients[parameter]
            sums[parameter] = torch.tensordot(factors_B.to(own), own, dims=1)
    return sums


def norm_of(gradients: Gradients) -> float:
    """Compute the norm of all gradients."""
    return math.hypot(*(float(gradient.norm()) for gradient in gradients.values()))


def find_difference(
    actual: Gradients, expected: Gradients, limit: float
) -> tuple[nn.Parameter | None, float]:
    """Return the first parameter that differs, or None, and the largest relative error."""
    whole = norm_of(expected)
    worst, first = 0.0, None
    for parameter, right in expected.items():
        gradient, own = actual[parameter], float(right.norm())
        error = float((gradient - right).norm())
        is_lost = own > limit**2 * whole and not gradient.any()
        if is_lost or not error <= limit * max(own, _ALONE * whole):
            first = parameter if first is None else first
        worst = max(worst, error / max(own, _ALONE * whole) if whole else error)
    return first, worst


def is_close(losses: Tensor, expected: Tensor, limit: float) -> Tensor:
    """Tell which losses are the expected ones, to a relative limit."""
    return (losses - expected).abs() <= limit * expected.abs() + 1e-12


def compare_collated(
    loop: Loop,
    batch: TrainingBatch,
    samples: Sequence[Any],
    collate: Callable[[list[Any]], Any] | None,
) -> list[str]:
    """Compare samples alone and in company, collated anew or cut from the batch (``Company``)."""

    def compute(value: Any) -> Any:
        args, named = give(loop.loss, value, model)
        return loop.loss(model, *args, **named)

    def compute_cut(tree: Any) -> Any:
        return batch.of_tree(tree).call(loop.loss, model)

    def gather(places: Sequence[int]) -> Any:
        assert collate is not None
        return collate([samples[number] for number in places])

    def cut(places: Sequence[int]) -> Any:
        return batch.take(places).tree

    assert loop.others is not None
    states = States(loop.others)
    with loop.plain() as model, states.restored():
        if collate is None:
            company = Company(model, compute_cut, cut, batch.samples, collates=False)
        else:
            is_ordered = loop.users is not None
            company = Company(model, compute, gather, len(samples), keeps_order=is_ordered)
        return company.compare(states)
