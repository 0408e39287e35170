"""The losses of some tokens, and their gradients of a head's outputs.

Shape legend: B samples, T tokens, N tokens of a chunk, d width of the hidden states, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dpprof.private.allocation_marks import allocates
from dpprof.private.layers.sample_losses import UNLABELLED
from dpprof.private.norms import triton_ops
from dpprof.private.norms.tiles import accumulator_of


class Beside(NamedTuple):
    """A frozen product that is added to a head's: that of the layer which an adapter adapts."""

    x_BTd: Tensor
    weight: Tensor
    bias: Tensor | None


class HeadLoss(NamedTuple):
    """The cross-entropy of a head's outputs with labels."""

    labels_BT: Tensor
    ignore_index: int = UNLABELLED
    label_smoothing: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    keep: bool = False
    beside: Beside | None = None

    def verify(self) -> None:
        """Refuse options out of their range (``ValueError``)."""
        if not 0 <= self.label_smoothing < 1:
            share = self.label_smoothing
            raise ValueError(f"label_smoothing must be from 0 to below 1, and is {share}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive, and is {self.softcap}")


class Operands(NamedTuple):
    """What logits are products of: rows and weights, those of an adapter beside a frozen head's."""

    x_Nd: Tensor
    weight: Tensor
    bias: Tensor | None
    beside_Nk: Tensor | None = None
    beside_weight: Tensor | None = None
    beside_bias: Tensor | None = None

    def rows(self, some: slice) -> "Operands":
        """Return those of some rows."""
        beside_Nk = None if self.beside_Nk is None else self.beside_Nk[some]
        return self._replace(x_Nd=self.x_Nd[some], beside_Nk=beside_Nk)

    def samples(self, some: slice, T: int) -> "Operands":
        """Return those of some samples."""
        return self.rows(slice(some.start * T, some.stop * T))

    @allocates("logits_and_loss")
    def multiply(self, out_NV: Tensor | None) -> Tensor:
        """Compute the products, (N, V), in the dtype of ``x_Nd``."""
        dtype = self.x_Nd.dtype
        weight_dV = self.weight.to(dtype).t()
        if self.bias is None:
            z_NV = torch.mm(self.x_Nd, weight_dV, out=out_NV)
        else:
            z_NV = torch.addmm(self.bias.to(dtype), self.x_Nd, weight_dV, out=out_NV)
        if self.beside_Nk is not None:
            assert self.beside_weight is not None
            bias = None if self.beside_bias is None else self.beside_bias.to(dtype)
            beside = self.beside_Nk.to(dtype), self.beside_weight.to(dtype)
            z_NV += functional.linear(*beside, bias)
        return z_NV


@allocates("logits_and_loss")
def find_losses(
    operands: Operands,
    labels_N: Tensor,
    loss: HeadLoss,
    *,
    incoming_N: Tensor | None = None,
    differentiates: bool = True,
    out_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of a chunk's rows, and their gradients of the product.

    Returns (N,) in the dtype of sums, 0 where a label is ignored; and (N, V), multiplied by
    ``incoming_N``, or None. ``out_NV`` gets the products, and gradients that have its dtype.
    """
    z_NV = operands.multiply(out_NV)
    if differentiates and triton_ops.is_fused(z_NV):
        options = (loss.ignore_index, loss.label_smoothing, loss.scale, loss.softcap)
        losses_N = triton_ops.differentiate_cross_entropy_(z_NV, labels_N, incoming_N, *options)
        return losses_N, z_NV
    z_NV = _scale_and_cap(z_NV.to(accumulator_of(z_NV.dtype)), loss)
    target_N = _find_target(z_NV, labels_N, loss)
    if differentiates:
        g_NV, lse_N = _differentiate(z_NV, labels_N, loss)
        if incoming_N is not None:
            g_NV *= incoming_N[:, None]
    else:
        g_NV, lse_N = None, torch.logsumexp(z_NV, dim=1)
    return (lse_N - target_N).masked_fill_(labels_N == loss.ignore_index, 0), g_NV


def _scale_and_cap(z_NV: Tensor, loss: HeadLoss) -> Tensor:
    if loss.scale != 1:
        z_NV *= loss.scale
    if loss.softcap is not None:
        z_NV.div_(loss.softcap).tanh_().mul_(loss.softcap)
    return z_NV


@allocates("logits_and_loss")
def _find_target(z_NV: Tensor, labels_N: Tensor, loss: HeadLoss) -> Tensor:
    """Compute what losses subtract from logarithms; (N,), NaN where a label is out of range."""
    V = z_NV.shape[1]
    is_there_N = (labels_N >= 0) & (labels_N < V)
    target_N = z_NV.gather(1, labels_N.clamp(0, V - 1)[:, None])[:, 0]
    if loss.label_smoothing:
        target_N *= 1 - loss.label_smoothing
        target_N += loss.label_smoothing * z_NV.mean(1)
    return target_N.masked_fill(~is_there_N, torch.nan)


@allocates("logits_and_loss")
def _differentiate(z_NV: Tensor, labels_N: Tensor, loss: HeadLoss) -> tuple[Tensor, Tensor]:
    """Turn logits into gradients, (N, V), in place; with each row's log of sum of exponentials."""
    V = z_NV.shape[1]
    slope_NV = None if loss.softcap is None else 1 - (z_NV / loss.softcap).square_()
    largest_N1 = z_NV.amax(1, keepdim=True)
    g_NV = z_NV.sub_(largest_N1).exp_()
    sums_N1 = g_NV.sum(1, keepdim=True)
    g_NV /= sums_N1
    if loss.label_smoothing:
        g_NV -= loss.label_smoothing / V
    share_N1 = g_NV.new_full((len(g_NV), 1), loss.label_smoothing - 1)
    g_NV.scatter_add_(1, labels_N.clamp(0, V - 1)[:, None], share_N1)
    if slope_NV is not None:
        g_NV *= slope_NV
    if loss.scale != 1:
        g_NV *= loss.scale
    g_NV.masked_fill_((labels_N == loss.ignore_index)[:, None], 0)
    return g_NV, (largest_N1 + sums_N1.log_())[:, 0]
