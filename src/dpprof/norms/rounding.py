"""How far rounding can put a norm, and a clipped sum, from what they are: the bounds.

A sample's squared norm is found from its inputs X and the gradients G of a layer's outputs, and
the clipped sum is made of both once more, in another order. Where the tokens' products cancel,
either may be mostly rounding. Three figures of each layer keep that from a sample's share:

* ``slack``, by how much the true squared norm may exceed the one that was found. Only the Gram
  ways need it, which subtract large squares: the error of a norm made of a gradient is
  relative to ``size``. With A = X X^T and B = G G^T an entry of A is a sum of d products, wrong by
  at most d u |x_t| |x_s| in any order of summation (Higham 2002, "Accuracy and Stability of
  Numerical Algorithms", section 3.1), so A is wrong by at most d u tr(A) in the Frobenius norm,
  and B likewise. By Cauchy and Schwarz the sum of A * B is wrong by at most
  ``u (d tr(A) |B| + p |A| tr(B) + m |A| |B|)`` and terms of u^2, where m is the depth of the last
  sum. ``eps = 2 u`` in place of u covers those, and accumulators that truncate.
* ``size``, |X|^2 |G|^2: what the rounding of X^T G is relative to, squared. A sum of n terms is
  wrong by about sqrt(n) u of what its terms come to in all (Higham and Mary 2019, "A New Approach
  to Probabilistic Rounding Error Analysis"); libraries sum in blocks, so n is at most ``BLOCK``.
  ``spread`` takes four times that.
* what a norm is told to be is then ``max(sqrt(found + slack), sqrt(spread) / TOLERATED)``: never
  below the true one by more than the share ``TOLERATED``, and so large where a gradient drowns
  in rounding that its rounding, scaled, stays below ``TOLERATED`` of the bound C.

So a sample adds at most ``C (1 + TOLERATED)`` to the sum as it is computed, rounding included. For
inputs that do not cancel none of it changes a norm by more than about 1e-3 in float32.

What is made and kept (``norms.plan``) needs none of it: its norm is that of the very numbers that
are summed.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096
"""Terms after which a library's sum begins anew."""

TOLERATED = {torch.float32: 2.0**-8, torch.float64: 2.0**-24}
"""By the dtype of sums, the share of the bound that a sample's rounding may come to."""

OF_FACTORS = 2.0**-14
"""The spread where the sum's factors are rounded to 16 bits after they were weighted, or to TF32,
as tensor cores ask for. Rounding is 2^-9 at most, in each token anew; so there a sample may add
up to ``C (1 + 2^-9 / OF_FACTORS * TOLERATED)``, an eighth beyond C, if all of it conspires."""

_SPLIT = 6
"""What three TF32 products for one (``norms.float32_products``) add to the terms, in eps."""


class Squares(NamedTuple):
    """Squared norms of the samples' gradients of one layer, each (B,)."""

    found_B: Tensor
    """As computed."""

    slack_B: Tensor | None
    """By how much the true ones may exceed them; None for no more than ``size`` says."""

    size_B: Tensor | None
    """What rounding is relative to, squared; None where what is summed was squared itself."""


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
    """Bound by how much the sum of A * B is wrong.

    Args:
        trace_of_x_B: tr(A), the squares of the inputs.
        trace_of_g_B: tr(B), the squares of the output gradients.
        square_of_x_B: |A|^2, the sum of A's squared entries.
        square_of_g_B: |B|^2.
        d: Terms of an entry of A.
        p: Terms of an entry of B.
        depth: Of the sum of A * B (``depth_of_tile``).
    """
    norm_of_x_B, norm_of_g_B = square_of_x_B.sqrt(), square_of_g_B.sqrt()
    of_inputs = (d + _SPLIT) * trace_of_x_B * norm_of_g_B
    of_gradients = (p + _SPLIT) * norm_of_x_B * trace_of_g_B
    eps = torch.finfo(norm_of_x_B.dtype).eps
    return eps * (of_inputs + of_gradients + depth * norm_of_x_B * norm_of_g_B)


def depth_of_tile(tile: int) -> int:
    """Bound how many additions follow one another in a sum over a square tile.

    PyTorch adds up in four levels, so that is four times the fourth root of the elements, and a
    few for vectors of lanes. The sums of tiles are added up in float64, which adds no error here.
    """
    return 16 + 4 * math.isqrt(tile)


def cross_slack(found_B: Tensor, size_B: Tensor, terms: int) -> Tensor:
    """Bound the rounding of squares from which another part of the same norm may be subtracted.

    Args:
        found_B: The squares.
        size_B: What the rounding of the gradient is relative to, squared.
        terms: Products that are summed for one of its elements.
    """
    eps = torch.finfo(found_B.dtype).eps
    wrong_B = (0.5 * eps * math.sqrt(terms)) * size_B.sqrt()
    return 16 * eps * found_B + (2 * found_B.sqrt() + wrong_B) * wrong_B


def spread(size_B: Tensor, terms: int, *, is_rounded: bool = False) -> Tensor:
    """Bound the rounding of a sum of products, squared; (B,).

    Args:
        size_B: ``Squares.size_B``.
        terms: Products that are summed for one element.
        is_rounded: Whether the sum's factors are rounded to 16 bits, or to TF32.
    """
    unit = 2 * torch.finfo(size_B.dtype).eps * math.sqrt(min(terms, BLOCK))
    unit = max(unit, OF_FACTORS if is_rounded else 0.0)
    return size_B * (unit * unit)
