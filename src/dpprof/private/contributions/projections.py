"""Compares the summed gradients with the measured ones, sample by sample, without keeping either.

The first pass of ``FlashClipping`` finds norms, and the second sums. In between, and in both, the
user's code runs. Checkpointed blocks, layers without a rule and hooks may draw other numbers the
second time, or write what was saved. So both passes project the gradient G of every matrix and
sample onto a random direction u: ``G u``, where u is normal, and G lies so that its rows are the
longer side. The direction is drawn anew for each batch, by a generator of its own. The projection
is linear in G, so the uses of a parameter add up, and a linear layer with inputs X and output
gradients Y needs no G: ``Y^T (X u)``. Gradients of vectors are compared as they are.

It proves the following. Let D be the difference between the two gradients of a sample, over
max(norm, C), or max(norm, gamma) in normalised clipping. The sample contributes at most
``C (1 + |D|)``, beside rounding. The square of the projection of D has the expectation |D|^2, and a
batch is refused where its root exceeds ``MAX_DIFFERENCE``. The worst D has rank one; it passes
where u is nearly orthogonal to it, with a probability of about ``limit / |D|``. In float32 that is
0.4 % for a sample that exceeds C by a sixteenth, and 0.02 % for 2 C. Others, and differences in
several layers, samples or steps, are seen more surely. It is no proof where a model knows the
direction.

Cost for a linear layer of d x p over T tokens, each time: 2 B T (d + p) FLOPs, and one read of
inputs and output gradients. Memory: B min(d, p) numbers for each matrix, B p for each vector.

Shape legend: B samples, T tokens, d width of an input, p width of an output, m rows and n columns
of a parameter, N numbers that a projection has.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.allocation_marks import allocates, allocates_for_its_caller
from dpprof.private.contributions.contributions import (
    ChunkedProduct,
    Convolution,
    Lookup,
    Product,
    Summable,
)
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.norms.convolution import project_rows
from dpprof.private.norms.tiles import accumulator_of, may_weigh, multiply

MAX_DIFFERENCE = {torch.float32: 2.0**-12, torch.float64: 2.0**-32}
"""The largest D that passes: the order of a sum rounds it, and projections are summed in float32.
"""

MAX_DIFFERENCE_WHEN_ROUNDED = 2.0**-5  # the same where tensor cores round to 16 bits or TF32


class Projections:
    """Projects the gradients of one batch as they are measured, and as they are summed."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        losses: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        # A complex number is two real ones.
        longest = max(max(_sides(p.shape)) * (1 + p.is_complex()) for p in parameters)
        self._direction = _draw_direction(longest, losses, generator)
        self._differences: dict[nn.Parameter, Tensor] = {}
        self._limit = 0.0

    @allocates("norm_samples")
    def note(self, parameter: nn.Parameter, contribution: Summable, *, is_measured: bool) -> None:
        """Project a contribution whose norm was found, or that is summed."""
        self._limit = max(self._limit, _limit_of(contribution))
        projected_BN = _project(contribution, self._direction.to(contribution[0].device))
        before_BN = self._differences.get(parameter)
        if before_BN is None:
            self._differences[parameter] = projected_BN if is_measured else -projected_BN
        else:
            sign = 1 if is_measured else -1
            self._differences[parameter] = before_BN.add(projected_BN, alpha=sign)

    @torch.no_grad()
    @allocates("norm_samples")
    def compare(self, norms_B: Tensor, least: float, excluded_B: Tensor | None) -> Tensor:
        """Tell which samples' gradients differ too much; (B,).

        Both norms are scaled as gradients are. Those shorter than ``least`` are compared
        with it: C, or the stability of normalised clipping, which makes short gradients
        longer. Samples in ``excluded_B`` contribute nothing.
        """
        on_device = [moved_BN.to(norms_B.device) for moved_BN in self._differences.values()]
        moved_B = torch.cat(on_device, dim=1).square_().sum(1).sqrt_()
        least = min(least, torch.finfo(norms_B.dtype).max)
        differs_B = ~(moved_B <= self._limit * norms_B.clamp(min=least))
        if excluded_B is not None:
            differs_B &= ~excluded_B
        return differs_B

    def find_difference(self, differs_B: Tensor) -> nn.Parameter | None:
        """Return the parameter in which the first sample that differs does so most; this waits."""
        differs = [] if isinstance(differs_B, FakeTensor) else differs_B.tolist()
        if not any(differs):
            return None
        sample = differs.index(True)
        squares = {p: float(d_BN[sample].square().sum()) for p, d_BN in self._differences.items()}
        return max(squares, key=lambda p: math.inf if math.isnan(squares[p]) else squares[p])


def _limit_of(contribution: Summable) -> float:
    match contribution:
        case Product() | ChunkedProduct() | Convolution() if contribution.is_rounded:
            return MAX_DIFFERENCE_WHEN_ROUNDED
        case ChunkedProduct(inputs):
            return MAX_DIFFERENCE[accumulator_of(inputs.dtype)]
        case (
            Product(_, gradients)
            | Convolution(_, gradients)
            | Lookup(_, gradients)
            | SampleGradients(gradients)
        ):
            return MAX_DIFFERENCE[accumulator_of(gradients.dtype)]


@allocates("norm_samples")
def _draw_direction(longest: int, losses: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw u, as long as the longest side of any parameter."""
    return torch.randn(longest, generator=generator, dtype=losses.dtype, device=losses.device)


def _project(contribution: Summable, u: Tensor) -> Tensor:
    """Project samples' gradients; (B, N): the longer side of a matrix, windows of a convolution."""
    match contribution:
        case ChunkedProduct():
            return torch.cat([_project(product, u) for _, product in contribution.parts()])
        case Product(x_BTd, g_BTp, transposed):
            left_BTm, right_BTn = (x_BTd, g_BTp) if transposed else (g_BTp, x_BTd)
            if right_BTn.shape[2] < left_BTm.shape[2]:
                left_BTm, right_BTn = right_BTn, left_BTm
            return _weigh(_meet(right_BTn, u), left_BTm)
        case Convolution(x, g, kernel):
            return project_rows(x, g, kernel, u[: kernel.width])
        case Lookup(ids_BT, g_BTd, rows, padding) if g_BTd.shape[2] < rows:
            return _weigh(u[ids_BT].masked_fill(ids_BT == padding, 0), g_BTd)
        case Lookup(ids_BT, g_BTd, rows, padding):
            shares_BT = _meet(g_BTd, u).masked_fill(ids_BT == padding, 0)
            return shares_BT.new_zeros(len(shares_BT), rows).scatter_add_(1, ids_BT, shares_BT)
        case SampleGradients(gradients):
            return _project_gradients(gradients, u)


@allocates_for_its_caller
def _project_gradients(gradients: Tensor, u: Tensor) -> Tensor:
    if gradients.dim() <= 2:  # noqa: PLR2004
        return gradients.flatten(1)
    matrices_Bmn = gradients.reshape(len(gradients), *_sides(gradients.shape[1:]))
    if gradients.dim() == 3 and matrices_Bmn.shape[2] < matrices_Bmn.shape[1]:  # noqa: PLR2004
        matrices_Bmn = matrices_Bmn.transpose(1, 2)
    return _meet(matrices_Bmn, u)


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Return the sides of a parameter as a matrix; a vector is a column."""
    return shape[:1].numel(), shape[1:].numel()


@allocates_for_its_caller
def _meet(sides_BTn: Tensor, u: Tensor) -> Tensor:
    """Multiply each row by the direction; (B, T), at least float32."""
    B, T, n = sides_BTn.shape
    u_n = u[:n].to(sides_BTn.dtype)
    if u_n.dtype == accumulator_of(u_n.dtype):
        return sides_BTn @ u_n
    return multiply(sides_BTn.reshape(1, B * T, n), u_n[None, :, None]).view(B, T)


@allocates_for_its_caller
def _weigh(shares_BT: Tensor, sides_BTn: Tensor) -> Tensor:
    """Sum the tokens of each sample by their shares; (B, n), at least float32."""
    exact = sides_BTn.dtype if may_weigh(sides_BTn) else accumulator_of(sides_BTn.dtype)
    return multiply(shares_BT[:, None].to(exact), sides_BTn)[:, 0]
