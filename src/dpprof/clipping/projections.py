"""Compares what is summed with what was measured, sample by sample, without keeping either.

The first pass of ``FlashClipping`` finds norms, and the second sums. In between, and in both, the
user's code runs. Checkpointed blocks, layers without a rule and hooks may draw other numbers the
second time, or write what was saved. So both passes project the gradient G of every parameter and
sample, as a matrix, onto random directions: ``V^T G u``, where u is normal, and so are the
``COLUMNS`` columns of V. Both are drawn anew for each batch, by a generator of their own. That is
linear in G, so the uses of a parameter add up, and a linear layer with inputs X and output
gradients Y needs no G: ``V^T (Y^T (X u))``. The projections of a vector are ``V^T G``.

What it proves: let D be the difference between the two gradients of a sample, over max(norm, C).
The sample contributes at most ``C (1 + |D|)``, beside rounding. The mean square of the projections
of D has the expectation |D|^2, and a batch is refused where its root exceeds ``LIMITS``. The worst
D has rank one; it passes where u is nearly orthogonal to it, with a probability of about ``limit /
|D|``. In float32 that is 0.4 % for a sample that exceeds C by a sixteenth, and 0.02 % for 2 C.
Others, and differences in several layers, samples or steps, are seen more surely. It is no proof
where a model knows the directions.

Cost for a linear layer of d x p over T tokens, each time: 2 B T (d + p) FLOPs, and one read of
inputs and output gradients.

Shape legend: B samples, T tokens, d width of an input, p width of an output, K projections, P
parameters.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.clipping.contributions import Contribution, Lookup, Product, SampleGradients
from dpprof.norms.tiles import accumulator_of
from dpprof.records.births import allocates

COLUMNS = 4

LIMITS = {torch.float32: 2.0**-12, torch.float64: 2.0**-32}
"""How large D may be: some kernels add in any order."""

LIMIT_WHEN_ROUNDED = 2.0**-5
"""The same where tensor cores round to 16 bits or TF32."""


class Projections:
    """Projects the gradients of one batch as they are measured, and as they are summed.

    Args:
        parameters: All that may get a gradient.
        losses: (B,), of the batch.
        generator: Draws the directions on the losses' device.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        losses: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        self._draw = partial(_draw_directions, parameters, losses, generator)
        self._directions: tuple[Tensor, Tensor] | None = None
        self._measured: dict[nn.Parameter, Tensor] = {}
        self._summed: dict[nn.Parameter, Tensor] = {}
        self._limit = 0.0

    def note_measured(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Project what a norm was found of; what is for a vector must be materialised."""
        self._limit = max(self._limit, _limit_of(contribution))
        self._add(self._measured, parameter, contribution)

    def note_summed(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Project what is summed; what is for a vector must be materialised."""
        self._add(self._summed, parameter, contribution)

    @torch.no_grad()
    @allocates("norm_samples")
    def find_difference(
        self, norms_B: Tensor, bound: float, excluded_B: Tensor | None
    ) -> nn.Parameter | None:
        """Find a sample whose gradients differ too much. This waits for the device.

        Args:
            norms_B: Of the samples' gradients, as measured.
            bound: C.
            excluded_B: Samples that contribute nothing; None for none.

        Returns:
            The parameter in which they differ most; None if no sample's do.
        """
        parameters = list(self._measured | self._summed)
        if not parameters:
            return None
        none_BK = norms_B.new_zeros(len(norms_B), COLUMNS)
        measured, summed = (
            torch.stack([found.get(one, none_BK).to(norms_B.device) for one in parameters])
            for found in (self._measured, self._summed)
        )
        squares_PB = (summed - measured).square_().mean(2)
        moved_B = squares_PB.sum(0).sqrt_()
        differs_B = ~(moved_B <= self._limit * norms_B.clamp(min=bound))
        if excluded_B is not None:
            differs_B &= ~excluded_B
        differs = [] if isinstance(differs_B, FakeTensor) else differs_B.tolist()
        if not any(differs):
            return None
        at = int(squares_PB[:, differs.index(True)].nan_to_num(math.inf).argmax())
        return parameters[at]

    @torch.no_grad()
    def _add(
        self,
        found: dict[nn.Parameter, Tensor],
        parameter: nn.Parameter,
        contribution: Contribution,
    ) -> None:
        if self._directions is None:
            self._directions = self._draw()
        u, V = (one.to(contribution[0].device) for one in self._directions)
        projected_BK = _project(contribution, u, V)
        before_BK = found.get(parameter)
        found[parameter] = projected_BK if before_BK is None else before_BK + projected_BK


def _limit_of(contribution: Contribution) -> float:
    match contribution:
        case Product() if contribution.is_rounded:
            return LIMIT_WHEN_ROUNDED
        case Product(_, gradients) | Lookup(_, gradients) | SampleGradients(gradients):
            return LIMITS[accumulator_of(gradients.dtype)]
    raise AssertionError(contribution)


@allocates("norm_samples")
def _draw_directions(
    parameters: Iterable[nn.Parameter], losses: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw u and V, as long as the narrower and the wider side of any parameter."""
    sides = [sorted(_sides(parameter.shape)) for parameter in parameters]
    narrow, wide = (max(lengths) for lengths in zip(*sides, strict=True))
    u, V = (
        torch.randn(shape, generator=generator, dtype=losses.dtype, device=losses.device)
        for shape in ((narrow,), (wide, COLUMNS))
    )
    return u, V


@allocates("norm_samples")
def _project(contribution: Contribution, u: Tensor, V: Tensor) -> Tensor:
    """Project the gradients of samples; (B, K). The narrower side of a matrix meets ``u``."""
    match contribution:
        case Product(x_BTd, g_BTp):
            narrow, wide = sorted((x_BTd, g_BTp), key=lambda side: side.shape[2])
            projected = _weigh(narrow @ _fit(u, narrow), wide)
        case Lookup(ids_BT, g_BTd, rows, padding):
            is_narrow = g_BTd.shape[2] <= rows
            shares_BT = g_BTd @ _fit(u, g_BTd) if is_narrow else u[ids_BT]
            shares_BT = shares_BT.masked_fill(ids_BT == padding, 0)
            if is_narrow:
                return _weigh(shares_BT, V[ids_BT])
            projected = _weigh(shares_BT, g_BTd)
        case SampleGradients(gradients):
            m, n = _sides(gradients.shape[1:])
            matrices = gradients.reshape(len(gradients), m, n)
            matrices = matrices if n <= m else matrices.transpose(1, 2)
            projected = matrices[:, :, 0] if min(m, n) == 1 else matrices @ _fit(u, matrices)
        case _:
            raise AssertionError(contribution)
    return projected.to(V.dtype) @ V[: projected.shape[1]]


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Return the sides of a parameter as a matrix; a vector is a column."""
    return shape[:1].numel(), shape[1:].numel()


def _fit(u: Tensor, side: Tensor) -> Tensor:
    return u[: side.shape[2]].to(side.dtype)


def _weigh(shares_BT: Tensor, sides_BTn: Tensor) -> Tensor:
    """Sum the tokens of each sample by their shares; (B, n)."""
    return torch.bmm(shares_BT[:, None].to(sides_BTn.dtype), sides_BTn)[:, 0]
