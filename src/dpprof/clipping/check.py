"""A check of a user's own model: are clipped gradients those of single samples, by definition?

A clipping sees the layers of a model and not what happens between them. Samples that are mixed or
permuted there, a first axis that is not the batch's but as long, a loss that looks at its
other samples: each makes norms those of something else. One batch shows it.

Shape legend: B samples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpprof.clipping.engine import Clipping

Losses = Callable[..., Tensor]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""By the dtype of losses, the largest error that is put down to rounding."""

TOLERANCE_OF_16_BITS = 0.05
"""The same where a layer computes in 16 bits, as under autocast."""


class WrongGradientError(RuntimeError):
    """Clipped gradients are not those of single samples; the message says where first."""


class Checked(NamedTuple):
    """What was compared, and how well it agreed."""

    samples: int
    parameters: int
    max_relative_error: float
    """Of norms of samples by parameter, and of the clipped sum, over the sample's or sum's norm."""


class _Sample(NamedTuple):
    """One sample's gradient, taken alone."""

    loss: float
    gradients: dict[nn.Parameter, Tensor]

    def norm(self, *parameters: nn.Parameter) -> float:
        """Compute the norm over some parameters, or over all."""
        some = parameters or self.gradients.keys()
        return math.hypot(*(float(self.gradients[p].norm()) for p in some if p in self.gradients))


def check(
    clipping: "Clipping", losses_of: Losses, *batch: Tensor, tolerance: float | None = None
) -> Checked:
    """Compare a clipping with per-sample gradients by definition, on one batch.

    Each sample is taken alone through the model as if nothing were clipped, with ordinary
    autograd. Then the whole batch is clipped. Parameters, gradients and random state are left as
    they were; ``nn.Dropout`` is switched off in between. It costs B + 3 ordinary steps and
    three gradients of memory.

    Args:
        clipping: Of the model that ``losses_of`` runs.
        losses_of: Computes losses, one for each sample, from tensors like those of the batch.
        batch: What ``losses_of`` takes, samples first; at least two samples.
        tolerance: Largest relative error; by default 1e-6 in float64, 1e-2 in float32 and 5e-2
            where layers compute in 16 bits.

    Raises:
        WrongGradientError: They differ. Named is the first parameter, in the model's order, and
            the sample, or that the loss of a sample depends on others.
        ValueError: There are not two samples, or ``losses_of`` is random.
        RuntimeError: The clipping refuses the step.

    Example:
        >>> def losses_of(tokens, labels):
        ...     logits = model(tokens).transpose(1, 2)
        ...     return cross_entropy(logits, labels, reduction="none").mean(1)
        >>> clipping.check(losses_of, tokens, labels)
    """
    count = _count_samples(batch)
    with _undisturbed(clipping):
        with clipping.resting():
            losses_B = _run(losses_of, batch, count)
            if not _alike(losses_B, _run(losses_of, batch, count)):
                raise ValueError("losses_of is random: the same batch has other losses each time")
            limit = _choose_limit(losses_B.dtype, tolerance)
            unclipped = _differentiate(losses_B, clipping)
            sums = {p: torch.zeros_like(p) for p in clipping.parameters}
            norms: list[dict[nn.Parameter, float]] = []
            for at in range(count):
                sample = _take_alone(losses_of, batch, at, clipping)
                _compare_loss(sample.loss, float(losses_B[at].detach()), at, limit)
                norms.append({p: sample.norm(p) for p in sums})
                _subtract(sample, unclipped)
                _add_clipped(sums, sample, clipping)
            _compare_unclipped(unclipped, norms, clipping, limit)
        clipping.squares = {}
        clipping.backward(_run(losses_of, batch, count))
        if clipping.computes_in_16_bits:
            limit = tolerance or TOLERANCE_OF_16_BITS
        worst = max(_compare_norms(clipping, norms, limit), _compare_sums(clipping, sums, limit))
    return Checked(count, len(sums), worst)


def _count_samples(batch: Sequence[Tensor]) -> int:
    counts = {len(part) if part.dim() else 0 for part in batch}
    if len(counts) != 1 or min(counts) < 2:  # noqa: PLR2004 (one sample has nobody to be mixed with)
        shapes = ", ".join(str(tuple(part.shape)) for part in batch) or "nothing"
        raise ValueError(
            f"a batch must be tensors with the same samples first, at least two; it is {shapes}"
        )
    return counts.pop()


def _run(losses_of: Losses, batch: Sequence[Tensor], count: int) -> Tensor:
    losses = losses_of(*batch)
    if losses.shape != (count,):
        shape = tuple(losses.shape)
        raise ValueError(f"losses_of must return one loss a sample, ({count},), and gave {shape}")
    return losses


def _alike(losses_B: Tensor, others_B: Tensor) -> bool:
    return torch.equal(losses_B.detach().nan_to_num(), others_B.detach().nan_to_num())


def _choose_limit(dtype: torch.dtype, tolerance: float | None) -> float:
    return TOLERANCE.get(dtype, TOLERANCE_OF_16_BITS) if tolerance is None else tolerance


def _take_alone(
    losses_of: Losses, batch: Sequence[Tensor], at: int, clipping: "Clipping"
) -> _Sample:
    loss = losses_of(*(part[at : at + 1] for part in batch))
    if loss.shape != (1,):
        raise WrongGradientError(
            f"sample {at} alone has losses of shape {tuple(loss.shape)}: the model or losses_of "
            "mixes samples, or puts another axis first"
        )
    return _Sample(float(loss.detach()), _differentiate(loss, clipping))


def _differentiate(losses: Tensor, clipping: "Clipping") -> dict[nn.Parameter, Tensor]:
    parameters = clipping.parameters
    found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    return {p: g for p, g in zip(parameters, found, strict=True) if g is not None}


def _subtract(sample: _Sample, unclipped: dict[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in sample.gradients.items():
        left = unclipped.get(parameter)
        unclipped[parameter] = -gradient if left is None else left - gradient


def _compare_loss(alone: float, together: float, at: int, limit: float) -> None:
    if not math.isfinite(alone) and not math.isfinite(together):
        return
    if not abs(alone - together) <= limit * max(abs(alone), abs(together)):
        raise WrongGradientError(
            f"the loss of sample {at} is {alone:.6g} alone and {together:.6g} among the others: "
            "the model or losses_of mixes samples, or puts another axis first"
        )


def _add_clipped(sums: dict[nn.Parameter, Tensor], sample: _Sample, clipping: "Clipping") -> None:
    if not (math.isfinite(sample.loss) and math.isfinite(sample.norm())):
        return
    for parameters, bound in clipping.groups:
        factor = min(1.0, bound / (sample.norm(*parameters) + 1e-6))
        for parameter in parameters:
            if parameter in sample.gradients:
                sums[parameter] += factor * sample.gradients[parameter]


def _compare_unclipped(
    left: dict[nn.Parameter, Tensor],
    norms: Sequence[dict[nn.Parameter, float]],
    clipping: "Clipping",
    limit: float,
) -> None:
    """Compare the batch's ordinary gradient, less each sample's alone, with nothing."""
    whole = math.hypot(*(norm for one in norms for norm in one.values()))
    if not math.isfinite(whole):
        return
    for parameter in clipping.parameters:
        error = float(left[parameter].norm()) / whole if parameter in left and whole else 0.0
        if not error <= limit:
            raise WrongGradientError(
                f"{clipping.name_of(parameter)}: the batch's gradient is not the sum of the "
                "samples' alone; a layer trains on a part of the batch, or mixes its samples"
            )


def _compare_norms(
    clipping: "Clipping", expected: Sequence[dict[nn.Parameter, float]], limit: float
) -> float:
    """Compare each sample's norm of each parameter, as a share of the sample's whole norm."""
    told = clipping.squares
    worst = 0.0
    for parameter in clipping.parameters:
        squares_B = told.get(parameter) if told else None
        for at, norms in enumerate(expected):
            whole = math.hypot(*norms.values())
            if not math.isfinite(whole) or whole == 0:
                continue
            found = 0.0 if squares_B is None else math.sqrt(max(0.0, float(squares_B[at])))
            error = abs(found - norms[parameter]) / whole
            if not error <= limit:
                raise WrongGradientError(
                    f"{clipping.name_of(parameter)}: the gradient of sample {at} has norm "
                    f"{norms[parameter]:.6g} alone and {found:.6g} among the others; samples are "
                    "mixed or permuted before this layer, or its input has another axis first"
                )
            worst = max(worst, error)
    return worst


def _compare_sums(clipping: "Clipping", sums: dict[nn.Parameter, Tensor], limit: float) -> float:
    """Compare the clipped sum, by parameter, as a share of the whole."""
    whole = math.hypot(*(float(one.norm()) for one in sums.values()))
    worst = 0.0
    for parameter, expected in sums.items():
        found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
        error = float((found - expected).norm()) / whole if whole else float(found.norm())
        if not error <= limit:
            raise WrongGradientError(
                f"{clipping.name_of(parameter)}: the clipped sum is off by {error:.2g} of the "
                "whole gradient's norm, though each sample's norm is right"
            )
        worst = max(worst, error)
    return worst


@contextmanager
def _undisturbed(clipping: "Clipping") -> Iterator[None]:
    """Leave gradients, counters, dropout and random numbers as they were."""
    gradients = {p: p.grad for p in clipping.parameters}
    kind = nn.modules.dropout._DropoutNd  # noqa: SLF001 (the common base)
    dropouts = [module for module in clipping.model.modules() if isinstance(module, kind)]
    rates = [one.p for one in dropouts]
    for parameter in gradients:
        parameter.grad = None
    for one in dropouts:
        one.p = 0.0
    try:
        with torch.random.fork_rng(), clipping.as_if_never():
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for one, rate in zip(dropouts, rates, strict=True):
            one.p = rate
