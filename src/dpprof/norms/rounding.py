"""Bounds of the rounding errors of a norm and of a clipped sum.

A sample's squared norm is computed from a layer's inputs X and output gradients G; the clipped sum
is computed from both again, in another order. Where the tokens' products cancel, either may be
mostly rounding error. Three figures of each layer keep a sample within its bound:

* ``slack``, by how much the true squared norm may exceed the computed one. Only the Gram ways need
  it, which subtract large squares; other ways have an error relative to ``size``. With
  A = X X^T and B = G G^T, an entry of A is a sum of d products. In any order of summation its
  error is at most d u |x_t| |x_s| (Higham 2002, "Accuracy and Stability of Numerical Algorithms",
  section 3.1); where slices are added up, at most n(d) u |x_t| |x_s| (section 4.2), with n far
  below d (``depth_of_products``). So the error of A is at most n(d) u tr(A) in the Frobenius norm,
  and that of B likewise. By Cauchy-Schwarz the error of the sum of A * B is at most
  ``u (n(d) tr(A) |B| + n(p) |A| tr(B) + m |A| |B|)`` plus terms of u^2, where m is the depth of the
  last sum. ``eps = 2 u`` in place of u covers those, accumulators that truncate, and the error of
  the traces, which are sums of the diagonals.
* ``size``, |X|^2 |G|^2: the rounding error of X^T G is relative to its square root. The error
  of a sum of n terms is about sqrt(n) u times the sum of their magnitudes (Higham and Mary 2019,
  "A New Approach to Probabilistic Rounding Error Analysis"); libraries sum in blocks, so n is at
  most ``BLOCK``. ``spread`` takes four times that, for batches of any size.
* the norm used is ``max(sqrt(found + slack), sqrt(spread) / TOLERATED)``. It is never below the
  true norm by more than the fraction ``TOLERATED``. Where a gradient is mostly rounding error, the
  norm is so large that the error, scaled, stays below ``TOLERATED`` of the bound C.

So a sample contributes at most ``C (1 + TOLERATED)`` to the computed sum, rounding included. For
inputs that do not cancel, this changes a norm in float32 by less than 1e-3 over few tokens; the
slack of Gram ways grows with them, to about 1e-2 where 1,024 tokens have much in common, or a
vocabulary has 128,000 ids. Per-sample gradients that are kept (``norms.linear``) need no
correction, because they themselves are summed.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096
"""Terms in a block of a library's sum."""

TOLERATED = {torch.float32: 2.0**-8, torch.float64: 2.0**-24}
"""The fraction of the bound that rounding may add to a sample, by the dtype of sums."""

OF_FACTORS = 2.0**-14
"""The spread where tensor cores round the sum's weighted operands to 16 bits or TF32. The error is
at most 2^-9 for each token; so a sample may contribute up to
``C (1 + 2^-9 / OF_FACTORS * TOLERATED)``, an eighth more than C, if all errors have one sign."""

_SPLIT = 6
"""What three TF32 products in place of one (``norms.float32_products``) add, in eps."""


class Squares(NamedTuple):
    """Squared norms of one layer's per-sample gradients, each (B,)."""

    found_B: Tensor
    """As computed."""

    slack_B: Tensor | None
    """By how much the true ones may exceed them; None where ``size`` bounds that."""

    size_B: Tensor | None
    """The square of what rounding is relative to; None for an inner product."""


def gram_slack(
    *,
    trace_of_x_B: Tensor,
    trace_of_g_B: Tensor,
    square_of_x_B: Tensor,
    square_of_g_B: Tensor,
    d: int,
    p: int,
    depth: int,
) -> Tensor:
    """Bound the error of the sum of A * B from tr(A), tr(B), |A|^2, |B|^2 and ``depth_of_sum``."""
    norm_of_x_B, norm_of_g_B = square_of_x_B.sqrt(), square_of_g_B.sqrt()
    of_inputs = (depth_of_products(d) + _SPLIT) * trace_of_x_B * norm_of_g_B
    of_gradients = (depth_of_products(p) + _SPLIT) * norm_of_x_B * trace_of_g_B
    eps = torch.finfo(norm_of_x_B.dtype).eps
    return eps * (of_inputs + of_gradients + depth * norm_of_x_B * norm_of_g_B)


def depth_of_products(terms: int) -> int:
    """Bound the depth of the sum of an entry of a Gram matrix, and of a product of two rows.

    Slices of 128 terms are added up one after another; on tensor cores slices of 1,024, whose
    terms are added at least 8 at once, after at most 8 within.
    """
    return min(terms, 128 + 8) + terms // 128


def depth_of_sum(terms: int) -> int:
    """Bound the number of successive additions in a sum of so many terms.

    PyTorch sums in four levels, so that is four times the fourth root of the terms, and a few for
    vector lanes. The sums of panels are added in float64, which adds no error here.
    """
    return 16 + 4 * math.isqrt(math.isqrt(terms))


def cross_slack(found_B: Tensor, size_B: Tensor, terms: int) -> Tensor:
    """Bound the error of ``Squares`` where another part of the same norm may be subtracted.

    ``terms`` is how many products the gradient sums for one element.
    """
    eps = torch.finfo(found_B.dtype).eps
    wrong_B = (0.5 * eps * math.sqrt(terms)) * size_B.sqrt()
    return 16 * eps * found_B + (2 * found_B.sqrt() + wrong_B) * wrong_B


def bound_spread(size_B: Tensor, *, is_rounded: bool = False) -> Tensor:
    """Bound the square of the rounding error of a sum of products over any number of samples; (B,).

    It does not depend on how many samples the batch has: their norms would, and one sample more
    would move what the others contribute. ``is_rounded`` says whether the operands are rounded to
    16 bits, or to TF32.
    """
    unit = 2 * torch.finfo(size_B.dtype).eps * math.sqrt(BLOCK)
    unit = max(unit, OF_FACTORS if is_rounded else 0.0)
    return size_B * (unit * unit)
