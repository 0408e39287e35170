"""Checks a user's model: are clipped gradients those of single samples, by definition?

A clipping sees the layers of a model, and not the code between them. That code may mix or permute
samples, put another axis of the same length first, or compute a loss from several samples; then
norms are not those of single samples. One batch shows it.

Shape legend: B samples.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dpprof.clipping.graph import nodes_behind
from dpprof.system.substitutes import substitute

if TYPE_CHECKING:
    from dpprof.clipping.engine import Clipping

Losses = Callable[..., Tensor]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""The largest error that rounding may cause, by the dtype of losses."""

TOLERANCE_OF_16_BITS = 0.05
"""The same where a layer computes in 16 bits, as under autocast."""

_MIXES = "the model or losses_of mixes samples, or puts another axis first"

_MIXED_BEFORE = (
    "samples are mixed or permuted before this layer, or its input has another axis first"
)

_DRAWN_AGAIN = (
    "backward draws other random numbers than forward did, for dropout maybe; checkpoint with "
    "preserve_rng_state=True"
)


class WrongGradientError(RuntimeError):
    """Clipped gradients are not those of single samples; the message names the first difference."""


class Checked(NamedTuple):
    """What was compared, and how well it agrees."""

    samples: int
    parameters: int
    max_relative_error: float
    """Of each sample's norm by parameter, and of the clipped sum, relative to the whole norm."""


class _Sample(NamedTuple):
    """The loss and gradient of one sample in a batch of its own."""

    loss: float
    gradients: dict[nn.Parameter, Tensor]

    def norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """Compute the norm over some parameters."""
        own = self.gradients
        return math.hypot(*(float(own[p].norm()) for p in parameters if p in own))


class _Expected(NamedTuple):
    """What clipping one batch should give."""

    norms: list[dict[nn.Parameter, float]]
    """Of each sample's gradient of each parameter."""

    sums: dict[nn.Parameter, Tensor]
    limit: float

    def add(self, sample: _Sample, clipping: "Clipping") -> None:
        """Add a sample."""
        self.norms.append({p: sample.norm([p]) for p in self.sums})
        if not (math.isfinite(sample.loss) and math.isfinite(sample.norm(sample.gradients))):
            return
        for parameters, bound in clipping.groups:
            factor = min(1.0, bound / (sample.norm(parameters) + 1e-6))
            for parameter in parameters:
                if parameter in sample.gradients:
                    self.sums[parameter] += factor * sample.gradients[parameter]


def check(
    clipping: "Clipping", losses_of: Losses, *batch: Tensor, tolerance: float | None = None
) -> Checked:
    """Compare a clipping with per-sample gradients by definition, on one batch.

    Ordinary autograd computes the gradient of each sample in a batch of its own, without clipping.
    Then the whole batch is clipped. A random model, such as one with dropout, is in evaluation
    meanwhile. It is clipped once more as in training, and compared with the gradient of each
    sample's loss in the whole batch, with the same random numbers. Parameters, gradients and random
    state stay as they were. It costs B + 5 ordinary steps, 2 B + 7 for a random model, and the
    memory of three gradients.

    Args:
        clipping: The clipping of the model that ``losses_of`` runs.
        losses_of: Computes losses, one for each sample, from tensors like those of the batch.
        batch: The arguments of ``losses_of``, samples first; at least two samples.
        tolerance: Largest relative error; by default 1e-6 in float64, 1e-2 in float32 and 5e-2
            where layers compute in 16 bits.

    Raises:
        WrongGradientError: They differ. The message names the first such parameter, in the model's
            order, and the sample; or it says that a sample's loss depends on other samples.
        ValueError: There are fewer than two samples, or ``losses_of`` is random in evaluation, or
            checkpoints in the reentrant way, or the model is sharded.
        RuntimeError: The clipping refuses the step.

    Example:
        >>> def losses_of(tokens, labels):
        ...     logits = model(tokens).transpose(1, 2)
        ...     return cross_entropy(logits, labels, reduction="none").mean(1)
        >>> clipping.check(losses_of, tokens, labels)
    """
    if clipping.ranks.is_sharded:
        raise ValueError("check needs whole parameters: check the model before fully_shard")
    count = _count_samples(batch)
    with _restored(clipping):
        is_random = _is_random(clipping, losses_of, batch, count)
        with _evaluation(clipping.model) if is_random else nullcontext():
            if is_random and _is_random(clipping, losses_of, batch, count):
                raise ValueError(
                    "losses_of is random in evaluation too: it gives the same batch other losses "
                    "each time"
                )
            expected = _compute_alone(clipping, losses_of, batch, tolerance)
            worst = _compare_clipped(clipping, losses_of, batch, expected, _MIXED_BEFORE, tolerance)
        if is_random:
            expected = _compute_together(clipping, losses_of, batch, expected.limit)
            again = _compare_clipped(clipping, losses_of, batch, expected, _DRAWN_AGAIN, tolerance)
            worst = max(worst, again)
    return Checked(count, len(clipping.parameters), worst)


def _compute_alone(
    clipping: "Clipping", losses_of: Losses, batch: Sequence[Tensor], tolerance: float | None
) -> _Expected:
    """Compute gradients of samples alone, and compare their losses and sum with the batch's."""
    count = _count_samples(batch)
    with clipping.disabled():
        losses_B = _run(losses_of, batch, count)
        _refuse_reentrant(losses_B)
        limit = TOLERANCE.get(losses_B.dtype, TOLERANCE_OF_16_BITS)
        expected = _expect(clipping, limit if tolerance is None else tolerance)
        remainder = _differentiate(losses_B, clipping)
        for at in range(count):
            sample = _run_alone(losses_of, batch, at, clipping)
            _compare_loss(sample.loss, float(losses_B[at].detach()), at, expected.limit)
            expected.add(sample, clipping)
            _subtract(sample, remainder)
        _compare_remainder(remainder, expected.norms, clipping, expected.limit)
    return expected


def _compute_together(
    clipping: "Clipping", losses_of: Losses, batch: Sequence[Tensor], limit: float
) -> _Expected:
    """Compute the gradients of samples in the batch, with the random numbers of ``_clip``."""
    expected = _expect(clipping, limit)
    with clipping.disabled(), _same_draws():
        losses_B = _run(losses_of, batch, _count_samples(batch))
        for loss in losses_B:
            gradients = _differentiate(loss, clipping, retain_graph=True)
            expected.add(_Sample(float(loss.detach()), gradients), clipping)
    return expected


def _expect(clipping: "Clipping", limit: float) -> _Expected:
    return _Expected([], {p: torch.zeros_like(p) for p in clipping.parameters}, limit)


def _compare_clipped(  # noqa: PLR0917 (all are needed)
    clipping: "Clipping",
    losses_of: Losses,
    batch: Sequence[Tensor],
    expected: _Expected,
    reason: str,
    tolerance: float | None,
) -> float:
    """Clip the batch, and compare norms and sums; returns the largest error."""
    for parameter in clipping.parameters:
        parameter.grad = None
    clipping.squares = {}
    with _same_draws():
        clipping.backward(_run(losses_of, batch, _count_samples(batch)))
    limit = expected.limit
    if clipping.computes_in_16_bits:
        limit = tolerance or TOLERANCE_OF_16_BITS
    return max(
        _compare_norms(clipping, expected.norms, limit, reason),
        _compare_sums(clipping, expected.sums, limit),
    )


@contextmanager
def _same_draws() -> Iterator[None]:
    """Draw the same random numbers each time inside the context."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _is_random(
    clipping: "Clipping", losses_of: Losses, batch: Sequence[Tensor], count: int
) -> bool:
    """Tell whether losses are drawn anew each time."""
    with clipping.disabled(), torch.no_grad():
        first, second = (_run(losses_of, batch, count).nan_to_num() for _ in range(2))
    return not torch.equal(first, second)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluate the model inside the context, as ``eval()`` does."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(substitute(module, "training", value=False))
        yield


def _count_samples(batch: Sequence[Tensor]) -> int:
    counts = {len(part) if part.dim() else 0 for part in batch}
    if len(counts) != 1 or min(counts) < 2:  # noqa: PLR2004 (one sample cannot be mixed)
        shapes = ", ".join(str(tuple(part.shape)) for part in batch) or "nothing"
        raise ValueError(
            f"a batch must be tensors of at least two samples, samples first; it is {shapes}"
        )
    return counts.pop()


def _refuse_reentrant(losses: Tensor) -> None:
    """Refuse graphs of which ``torch.autograd.grad`` sees a part."""
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_behind(losses)):
        raise ValueError(
            "reentrant checkpointing hides layers from the check; check with use_reentrant=False"
        )


def _run(losses_of: Losses, batch: Sequence[Tensor], count: int) -> Tensor:
    losses = losses_of(*batch)
    if losses.shape != (count,):
        shape = tuple(losses.shape)
        raise ValueError(
            f"losses_of must return one loss a sample, ({count},), and returned {shape}"
        )
    return losses


def _run_alone(
    losses_of: Losses, batch: Sequence[Tensor], at: int, clipping: "Clipping"
) -> _Sample:
    loss = losses_of(*(part[at : at + 1] for part in batch))
    if loss.shape != (1,):
        raise WrongGradientError(
            f"sample {at} alone has losses of shape {tuple(loss.shape)}: {_MIXES}"
        )
    return _Sample(float(loss.detach()), _differentiate(loss, clipping))


def _differentiate(
    losses: Tensor, clipping: "Clipping", *, retain_graph: bool = False
) -> dict[nn.Parameter, Tensor]:
    parameters = clipping.parameters
    found = torch.autograd.grad(
        losses.sum(), parameters, allow_unused=True, retain_graph=retain_graph
    )
    return {p: g for p, g in zip(parameters, found, strict=True) if g is not None}


def _subtract(sample: _Sample, remainder: dict[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in sample.gradients.items():
        before = remainder.get(parameter)
        remainder[parameter] = -gradient if before is None else before - gradient


def _compare_loss(alone: float, together: float, at: int, limit: float) -> None:
    if not math.isfinite(alone) and not math.isfinite(together):
        return
    if not abs(alone - together) <= limit * max(abs(alone), abs(together)):
        raise WrongGradientError(
            f"the loss of sample {at} is {alone:.6g} alone, {together:.6g} in the batch: {_MIXES}"
        )


def _compare_remainder(
    remainder: dict[nn.Parameter, Tensor],
    norms: Sequence[dict[nn.Parameter, float]],
    clipping: "Clipping",
    limit: float,
) -> None:
    """Compare the batch's gradient minus those of its samples, all unclipped, with zero."""
    whole = math.hypot(*(norm for one in norms for norm in one.values()))
    if not math.isfinite(whole):
        return
    for parameter in clipping.parameters:
        error = (
            float(remainder[parameter].norm()) / whole if parameter in remainder and whole else 0.0
        )
        if not error <= limit:
            raise WrongGradientError(
                f"{clipping.name_of(parameter)}: the batch's gradient is not the sum of the "
                "samples' gradients; a layer trains on a part of the batch, or mixes its samples"
            )


def _compare_norms(
    clipping: "Clipping",
    expected: Sequence[dict[nn.Parameter, float]],
    limit: float,
    reason: str,
) -> float:
    """Compare each sample's norm of each parameter, relative to the sample's whole norm."""
    squares = clipping.squares or {}
    worst = 0.0
    for parameter in clipping.parameters:
        squares_B = squares.get(parameter)
        for at, norms in enumerate(expected):
            whole = math.hypot(*norms.values())
            if not math.isfinite(whole) or whole == 0:
                continue
            found = 0.0 if squares_B is None else math.sqrt(max(0.0, float(squares_B[at])))
            error = abs(found - norms[parameter]) / whole
            if not error <= limit:
                raise WrongGradientError(
                    f"{clipping.name_of(parameter)}: the gradient of sample {at} has norm "
                    f"{norms[parameter]:.6g} by definition and {found:.6g} as it is clipped: "
                    f"{reason}"
                )
            worst = max(worst, error)
    return worst


def _compare_sums(clipping: "Clipping", sums: dict[nn.Parameter, Tensor], limit: float) -> float:
    """Compare the clipped sum of each parameter, relative to the norm of all."""
    whole = math.hypot(*(float(one.norm()) for one in sums.values()))
    worst = 0.0
    for parameter, expected in sums.items():
        found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
        error = float((found - expected).norm()) / whole if whole else float(found.norm())
        if not error <= limit:
            raise WrongGradientError(
                f"{clipping.name_of(parameter)}: each sample's norm is right, but the error of the "
                f"clipped sum is {error:.2g} of the whole gradient's norm"
            )
        worst = max(worst, error)
    return worst


@contextmanager
def _restored(clipping: "Clipping") -> Iterator[None]:
    """Restore gradients, counters and random state at the end of the context."""
    gradients = {p: p.grad for p in clipping.parameters}
    with torch.random.fork_rng(), clipping.restored():
        try:
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
