"""Tells which samples' gradients cancel so far that rounding counts, and what it adds to C.

A sample's squared norm is computed from a layer's inputs X and output gradients G, in the way that
is cheapest for a batch; the clipped sum is computed from both again, in another order. Where
tokens cancel, rounding errors are large beside what is left, and they depend on the longest sample
of the batch, on how many samples there are, and so on. Two figures say how far that may go:

* ``size``, |X|^2 |G|^2: the rounding error of X^T G is relative to its square root. The error of a
  sum of n terms is about sqrt(n) u times the sum of their magnitudes (Higham and Mary 2019, "A New
  Approach to Probabilistic Rounding Error Analysis"), and libraries sum in blocks of a few thousand
  terms at most: 2^-16 sqrt(size) is four times that in float32.
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

A sample is *unsure* where size exceeds ``MOST``^2 M, or slack 2^-5 M (in float64 2^-34 M), or where
numbers may have left the range of their format; M is the larger of the squared norm and the square
of the norm up to which nothing is clipped. Then neither norm nor product is used: its gradient is
computed again by itself, in float64, from its tokens that have a gradient
(``contributions.alone``). The norm is that of the very gradient that is added, so the sample
contributes C, and no other sample moves a bit of it.

For all others the computed norm is used as it is, in whichever way. So, in float32:

* A sample contributes at most C (1 + 2^-8): its norm is too small by 2^-9 at most, and the sum
  rounds by 2^-9. If all rounding errors were as large as they can be, and of one sign, the norm
  would be too small by 2^-6. Tensor cores round the sum's weighted operands to 16 bits or TF32, by
  at most 2^-9 each: there C (1 + 1/4) if all these errors have one sign. In float64 the bound is
  C (1 + 2^-34).
* Another sample, a longer one, or another order moves what a sample contributes by no more than
  twice that: both results are that close to the exact one. Where tokens do not cancel it is about
  1e-6 C, and for unsure samples nothing. This says nothing on what the model itself computes of the
  sample: operators of PyTorch round it otherwise in a batch of another shape. So do gradients that
  come as they are: of layers without a rule, recurrent layers, group norms, the bias of a head
  whose losses are computed in chunks, convolutions whose rows ``graph.rows`` adds up, and on
  CUDA all vectors. Their norm is that of what is added, so C holds for them too.

Nothing is unsure in ordinary trainings: for random tokens size is T times the squared norm, so
16,384 tokens are too few, and slack stays below 2^-5 of it also where 1,024 tokens have much in
common, or a vocabulary has 128,000 ids.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 128.0  # the most that both factors' norms, multiplied, are of the norm of a sure sample
_SLACK = 2.0**18  # the most slack, in eps times the squared norm
_LARGEST = 1e32  # larger squared norms count as this one, so that what overflows is unsure
_LOST = 1e-30  # more than what underflows of a sum of squares
LEAST_NORM = 1e-6  # what ``engine.factor`` adds to a norm: errors of shorter ones hardly count
_SPLIT = 6  # what three TF32 products in place of one (``norms.float32_products``) add, in eps


class Squares(NamedTuple):
    """Squared norms of one layer's per-sample gradients, each (B,)."""

    found_B: Tensor  # the squared norms as computed
    slack_B: Tensor | None  # how far true ones may exceed them; None: see ``size``
    size_B: Tensor | None
    """The square of what rounding errors are relative to; None where nothing cancels, and for an
    inner product."""


def size_of(square_of_x_B: Tensor, square_of_g_B: Tensor) -> Tensor:
    """Multiply the squares of both factors, neither of which may vanish by underflow; (B,)."""
    return (square_of_x_B + _LOST) * (square_of_g_B + _LOST)


def is_unsure(squares: Squares, least: float) -> Tensor:
    """Tell for which samples, longer than ``least``, rounding may count; (B,)."""
    found_B, slack_B, size_B = squares
    most_B = found_B.clamp(min(least, 1e15) ** 2, _LARGEST)
    # NaN is never sure.
    is_sure_B = found_B.isfinite() if size_B is None else size_B <= MOST**2 * most_B
    if slack_B is not None:
        is_sure_B &= slack_B <= _SLACK * torch.finfo(found_B.dtype).eps * most_B
    return ~is_sure_B


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
    # Each is at most the trace, also where squares underflow.
    norm_of_x_B, norm_of_g_B = (
        torch.where(square_B < _LOST, trace_B, square_B.sqrt())
        for square_B, trace_B in ((square_of_x_B, trace_of_x_B), (square_of_g_B, trace_of_g_B))
    )
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
