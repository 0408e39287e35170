"""What one use of a parameter adds to each sample's gradient, without making the gradient.

A share holds what the addition is made of, and knows the sum of it over samples, weighted. Sums
are float32 at least, and so are weights: rounded to 16 bits, a weight would let a whole sample
exceed its bound, and a sum would move by more than a sample does.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.norms import placement
from dpprof.norms.float32_products import allows_tf32
from dpprof.norms.scale import scale_gradients
from dpprof.norms.tiles import REDUCED_SLICE, accumulator_of, multiply, spans


class Product(NamedTuple):
    """A matrix that tokens were multiplied with: ``g_b^T x_b``, (p, d)."""

    x_BTd: Tensor
    g_BTp: Tensor
    transposed: bool = False
    """Whether the parameter is (d, p), as in GPT-2's Conv1D."""

    def make(self, x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        """Make each sample's gradient; (B, p, d), or (B, d, p)."""
        left, right = (x_BTd, g_BTp) if self.transposed else (g_BTp, x_BTd)
        return multiply(left.transpose(1, 2), right)

    @property
    def is_rounded(self) -> bool:
        """Whether the sum's factors are rounded to 16 bits or TF32, for tensor cores."""
        x = self.x_BTd
        is_short = x.dtype != accumulator_of(x.dtype)
        return placement.is_cuda(x) and (is_short or (x.dtype is torch.float32 and allows_tf32()))

    def sum(self, weights_B: Tensor) -> Tensor:
        """Sum over samples, weighted; the narrower of the two factors takes the weights."""
        x, g = self.x_BTd, self.g_BTp
        weights_B11 = weights_B[:, None, None]
        if placement.is_cuda(x) or x.dtype == accumulator_of(x.dtype):
            if x.shape[2] <= g.shape[2]:
                x = (x * weights_B11).to(x.dtype)
            else:
                g = (g * weights_B11).to(g.dtype)
            left, right = (x, g) if self.transposed else (g, x)
            return _multiply(left.flatten(0, 1).t(), right.flatten(0, 1))
        left, right = (x, g) if self.transposed else (g, x)
        weights_N1 = weights_B11.expand(-1, x.shape[1], 1).flatten(0, 1)
        left_Nm, right_Nn = left.flatten(0, 1), right.flatten(0, 1)
        summed = weights_B.new_zeros(left_Nm.shape[1], right_Nn.shape[1])
        for some in spans(len(left_Nm), REDUCED_SLICE):
            summed.addmm_((left_Nm[some] * weights_N1[some]).t(), right_Nn[some].to(summed.dtype))
        return summed


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices; those of 16 bits into float32."""
    if left.dtype == accumulator_of(left.dtype):
        return left @ right
    return torch.mm(left, right, out_dtype=accumulator_of(left.dtype))


class Lookup(NamedTuple):
    """A table whose rows were looked up, (rows, d); what is padding has no gradient."""

    ids_BT: Tensor
    g_BTd: Tensor
    rows: int
    padding: int
    """Row without a gradient, -1 for none."""

    @property
    def trained_BTd(self) -> Tensor:  # noqa: N802 (its shape)
        """The gradient of what was looked up, zero where it is padding."""
        if self.padding < 0:
            return self.g_BTd
        return self.g_BTd.masked_fill((self.ids_BT == self.padding)[:, :, None], 0)

    def sum(self, weights_B: Tensor) -> Tensor:
        """Sum over samples, weighted."""
        summed: Tensor = torch.ops.aten.embedding_dense_backward(
            self.g_BTd * weights_B[:, None, None], self.ids_BT, self.rows, self.padding, False
        )
        return summed


class Shift(NamedTuple):
    """A vector that was added to every token, (p,)."""

    g_BTp: Tensor

    def make(self, g_BTp: Tensor) -> Tensor:
        """Make each sample's gradient; (B, p)."""
        return g_BTp.sum(1, dtype=accumulator_of(g_BTp.dtype))

    def sum(self, weights_B: Tensor) -> Tensor:
        """Sum over samples, weighted."""
        return Whole(self.make(*self)).sum(weights_B)


class Scale(NamedTuple):
    """A vector that every normalised token was multiplied with, (d,)."""

    x_BTd: Tensor
    mean_BT1: Tensor | None
    rstd_BT1: Tensor
    g_BTd: Tensor

    def make(
        self, x_BTd: Tensor, mean_BT1: Tensor | None, rstd_BT1: Tensor, g_BTd: Tensor
    ) -> Tensor:
        """Make each sample's gradient; (B, d)."""
        return scale_gradients(x_BTd, g_BTd, mean_BT1, rstd_BT1)

    def sum(self, weights_B: Tensor) -> Tensor:
        """Sum over samples, weighted."""
        return Whole(self.make(*self)).sum(weights_B)


class Whole(NamedTuple):
    """Each sample's gradient itself."""

    gradients: Tensor
    """(B, *shape of the parameter)."""

    @staticmethod
    def make(gradients: Tensor) -> Tensor:
        """Have them."""
        return gradients

    def sum(self, weights_B: Tensor) -> Tensor:
        """Sum over samples, weighted."""
        flat = self.gradients.flatten(1)
        weights_B = weights_B.to(torch.promote_types(weights_B.dtype, flat.dtype))
        if flat.dtype == weights_B.dtype:
            return (weights_B @ flat).view(self.gradients.shape[1:])
        summed = weights_B.new_empty(flat.shape[1])
        for some in spans(len(summed), REDUCED_SLICE**2):
            summed[some] = weights_B @ flat[:, some].to(weights_B.dtype)
        return summed.view(self.gradients.shape[1:])


Made = Shift | Scale | Whole
"""What is small for each sample, or has no other form: gradients are made of it."""

Contribution = Product | Lookup | Made


def leave_out(contribution: "Contribution", left_out_B: Tensor) -> "Contribution":
    """Put zeros where samples are that must add nothing, whatever they hold: 0 times NaN is NaN."""

    def fill(part: Tensor) -> Tensor:
        return part.masked_fill(left_out_B.to(part.device).view(-1, *(1,) * (part.dim() - 1)), 0)

    numbers: dict[str, Any] = {
        name: fill(part)
        for name, part in contribution._asdict().items()
        if isinstance(part, Tensor) and part.is_floating_point()
    }
    return contribution._replace(**numbers)


def merge(contributions: Sequence[Contribution]) -> list[Contribution] | None:
    """Combine what several uses of one parameter add.

    Uses of a matrix, and of a table, are as one use by all their tokens; what has no such
    form is made and added up.

    Returns:
        A share for each kind of use; None where one cannot be combined with another.
    """
    products = [contribution for contribution in contributions if isinstance(contribution, Product)]
    lookups = [contribution for contribution in contributions if isinstance(contribution, Lookup)]
    others = [contribution for contribution in contributions if isinstance(contribution, Made)]
    transposed = {product.transposed for product in products}
    if len(transposed) > 1 or (lookups and (others or True in transposed)) or (others and products):
        return None
    merged: list[Contribution] = []
    if products:
        x, g = _join(p.x_BTd for p in products), _join(p.g_BTp for p in products)
        merged.append(Product(x, g, products[0].transposed))
    if lookups:
        padding = lookups[0].padding
        if any(one.padding != padding for one in lookups):  # each table has its own
            lookups = [one._replace(g_BTd=one.trained_BTd, padding=-1) for one in lookups]
            padding = -1
        ids, g = _join(one.ids_BT for one in lookups), _join(one.g_BTd for one in lookups)
        merged.append(lookups[0]._replace(ids_BT=ids, g_BTd=g, padding=padding))
    if others:
        made = [one.make(*one) for one in others]
        merged.append(Whole(torch.stack(made).sum(0)))
    return merged


def _join(parts: Iterable[Tensor]) -> Tensor:
    """Put tokens after one another; (B, T, ...), each, to (B, sum of T, ...)."""
    first, *rest = parts
    return torch.cat([first, *rest], dim=1) if rest else first
