"""Squared norms of the per-sample gradients of a linear layer's weight, by the cheapest way.

The gradient of sample b is ``g_b^T x_b``: the sum over tokens of the outer product of output
gradient and input. Two ways compute its squared norm:

* ``tiled gram``: the sum over pairs of tokens of ``(x_t . x_s)(g_t . g_s)`` from two T x T Gram
  matrices (Li et al. 2022, "Large Language Models Can Be Strong Differentially Private Learners",
  section 4), in panels: some rows, up to the diagonal, as both matrices are symmetric. Goodfellow
  2015, "Efficient per-example gradient computations", is the case of one token.
* ``tiled product``: the gradient in tiles of d x p, one at a time.

The tiled ways need at most ``WORKSPACE_BYTES`` for any T, d and p. On CUDA with Triton they are
kernels that keep tiles in registers (``norms.triton_launch``), unless PyTorch's products are
faster, as they may be in exact float32.

The cost of a tiled way is ``flops + FLOPS_PER_BYTE * bytes``:

* tiled Gram: for each panel of a rows and b columns ``2 a b (d + p)`` FLOPs, and
  ``(a + b)(d + p) + 4 a b`` elements moved: operands read, two products written and read;
* tiled product: ``2 T d p`` FLOPs, and for each tile of r rows and c columns
  ``T (r + c) + 2 r c`` elements moved.

A per-sample gradient has d p elements, its activations and output gradients T (d + p). Where d p is
not more, book-keeping materialises the gradients and keeps them instead (``kept product``): that
needs less memory, and the weighted sum costs ``2 d p`` FLOPs in place of another ``2 T d p``.
Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost", keep gradients
where ``2 T^2 > d p``; comparing what is kept gives T (d + p). Tensor cores multiply many times
faster than memory moves float32: there gradients are kept only where that costs less too. A kept
gradient is written once and read twice, 12 d p bytes; otherwise operands are read for the norm, and
the narrower one is scaled for the sum. The gradient of a batch's only sample becomes the sum in its
place, as in plain training, so it is always kept, unless ranks share the sum.

Both ways take ``x_BTd`` and ``g_BTp``, and return ``Squares`` or what these follow from
(``GramSums``), (B,) each, in float32 (float64 for float64).

Shape legend: B samples, T tokens, d width of the input, p width of the output.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dpprof.private.allocation_marks import allocates, allocates_for_its_caller
from dpprof.private.norms.code_paths import Way
from dpprof.private.norms.rounding import Squares, depth_of_sum, gram_slack, size_of
from dpprof.private.norms.tiles import (
    REDUCED_SLICE,
    SUMMED_SLICE,
    accumulator_of,
    multiply,
    multiply_and_sum,
    multiply_in_slices,
    samples_at_once,
    spans,
    square,
)
from dpprof.private.norms.triton_ops import (
    gram_squares,
    is_faster,
    is_fused,
    launch,
    product_squares,
)

PRODUCT_TILE = (256, 512)  # rows (of d) and columns (of p) of a product's tile
GRAM_ROWS = 128  # the most rows of a panel of a Gram matrix; half of it for up to ``FEW`` tokens
GRAM_COLUMNS = 4096  # the most columns of a panel before its block on the diagonal

FEW = 256

_VECTOR = 4  # the rows of a panel are a multiple of this
FLOPS_PER_BYTE = 10  # A round figure: data sheets of CPUs and GPUs give 5 to 20 in float32
ON_TENSOR_CORES = 200  # in 16 bits or TF32: an A100, H100 and H200 reach 150 to 250

OF_GRAMS = 1.1
"""How many times as long a FLOP takes in a GPU's kernel of Gram matrices as in that of products. It
decides for a few shapes alone whether gradients are kept. By the times that ``step_time`` predicts,
values from 1.0 on decide best on an H100, whose copy engine helps that kernel, and values from 1.6
on decide best on an A100."""


def gram_rows(T: int) -> int:
    """Return the rows of each panel, so that all have about as many."""
    most = GRAM_ROWS if T > FEW else GRAM_ROWS // 2
    panels = max(1, -(-T // most))
    return -(-T // (panels * _VECTOR)) * _VECTOR or _VECTOR


class GramSums(NamedTuple):
    """What squared norms and their slack follow from, of one layer or stacked of several."""

    sums_5B: Tensor  # sums of A * B, the traces of A and B, and the squares of both; (..., 5, B)
    d: int
    p: int
    terms: int  # the most terms that are added up in a row; the sums of these are added in float64

    @property
    def found_B(self) -> Tensor:  # noqa: N802 (its shape)
        """Squared norms as computed."""
        return self.sums_5B.select(-2, 0)

    def square(self) -> Squares:
        """Return squared norms, (..., B) each."""
        found_B, trace_of_x_B, trace_of_g_B, square_of_x_B, square_of_g_B = self.sums_5B.unbind(-2)
        slack_B = gram_slack(
            trace_of_x_B=trace_of_x_B,
            trace_of_g_B=trace_of_g_B,
            square_of_x_B=square_of_x_B,
            square_of_g_B=square_of_g_B,
            d=self.d,
            p=self.p,
            depth=depth_of_sum(self.terms),
        )
        return Squares(found_B, slack_B, size_of(trace_of_x_B, trace_of_g_B))


def tiled_gram(x_BTd: Tensor, g_BTp: Tensor) -> GramSums:
    """Multiply Gram matrices panel by panel."""
    by_products = partial(_sum_gram_panels, x_BTd, g_BTp, _multiply_panel)
    if is_fused(x_BTd) and is_faster(Way.TILED_GRAM, x_BTd, g_BTp, by_products):
        sums_5B = launch(gram_squares, x_BTd, g_BTp)
    else:
        sums_5B = by_products()
    return GramSums(sums_5B, x_BTd.shape[2], g_BTp.shape[2], _panel_size(x_BTd.shape[1]))


def gram_of_given(x_BTd: Tensor, grams_BTT: Tensor, p: int) -> GramSums:
    """Multiply inputs' Gram matrices by panels of given ones of output gradients of width p."""
    T, d = x_BTd.shape[1:]
    sums_5B = _sum_gram_panels(
        x_BTd, grams_BTT, lambda grams_BTT, rows, columns: grams_BTT[:, rows, columns]
    )
    return GramSums(sums_5B, d, p, _panel_size(T))


def fill_grams(g_BTp: Tensor, grams_BTT: Tensor) -> None:
    """Write the panels of the Gram matrices of output gradients."""
    for rows, columns in _gram_panels(g_BTp.shape[1]):
        grams_BTT[:, rows, columns] = _multiply_panel(g_BTp, rows, columns)


PanelOf = Callable[[Tensor, slice, slice], Tensor]  # (B, rows, columns) of a Gram matrix


@functools.lru_cache(64)  # of long sequences there are many panels
def _gram_panels(T: int) -> list[tuple[slice, slice]]:
    """List rows and columns of panels: up to and with the block on the diagonal."""
    panels = []
    for rows in spans(T, gram_rows(T)):
        *others, last = spans(rows.start, GRAM_COLUMNS) if rows.start else [slice(0, 0)]
        panels += [(rows, columns) for columns in others]
        panels.append((rows, slice(last.start, rows.stop)))
    return panels


def _panel_size(T: int) -> int:
    """Return the most elements of a panel."""
    rows = gram_rows(T)
    return rows * min(max(T, 1), GRAM_COLUMNS + rows)


@allocates_for_its_caller
def _multiply_panel(a_BTK: Tensor, rows: slice, columns: slice) -> Tensor:
    if rows == columns == slice(0, a_BTK.shape[1]):  # all of it, without a slice
        return multiply_in_slices(a_BTK, a_BTK.transpose(1, 2))
    return multiply_in_slices(a_BTK[:, rows], a_BTK[:, columns].transpose(1, 2))


def _sum_gram_panels(x_BTd: Tensor, of_gradients: Tensor, panel_of: PanelOf) -> Tensor:
    """Add up ``sum_of_grams`` over all panels; (5, B)."""
    B, T, _ = x_BTd.shape
    size, height = _panel_size(T), gram_rows(T)
    at_once = samples_at_once(B, 2 * size, (height + size // height) * SUMMED_SLICE, x_BTd.dtype)
    panels = _gram_panels(T)
    if at_once == B and len(panels) == 1:
        return _gram_panel(x_BTd, partial(panel_of, of_gradients), *panels[0])
    sums_5B = x_BTd.new_zeros((5, B), dtype=torch.float64)
    for some in spans(B, at_once):
        x, g = x_BTd[some], of_gradients[some]
        for rows, columns in panels:
            sums_5B[:, some] += _gram_panel(x, partial(panel_of, g), rows, columns)
    return sums_5B.to(accumulator_of(x_BTd.dtype))


@allocates("gram_matrices")
def _gram_panel(
    x_BTd: Tensor, of_gradients: Callable[[slice, slice], Tensor], rows: slice, columns: slice
) -> Tensor:
    """Sum over one panel, as ``sum_of_grams``; (5, B)."""
    both = (_multiply_panel(x_BTd, rows, columns), of_gradients(rows, columns))
    return sum_of_grams(*both, twice=min(rows.start, columns.stop) - columns.start)


@allocates_for_its_caller
def sum_of_grams(a_BMN: Tensor, b_BMN: Tensor, *, twice: int = 0) -> Tensor:
    """Sum A * B, the diagonals of both, and the squares of both; (5, B). This overwrites A.

    The first ``twice`` columns count twice; diagonals are those of the others.
    """
    both = (a_BMN, b_BMN)
    once = [gram[:, :, twice:] for gram in both] if twice else both
    traces = [gram.diagonal(dim1=1, dim2=2).sum(1) for gram in once]
    squares = [_square(gram) for gram in once]
    if twice:
        for square_B, gram in zip(squares, both, strict=True):
            square_B.add_(_square(gram[:, :, :twice]), alpha=2)
        a_BMN[:, :, :twice] *= 2
    return torch.stack([multiply_and_sum(*both), *traces, *squares])


@allocates_for_its_caller
def _square(a_BMN: Tensor) -> Tensor:
    square_B: Tensor = torch.linalg.vector_norm(a_BMN, dim=(1, 2)).square_()
    return square_B


def tiled_product(x_BTd: Tensor, g_BTp: Tensor) -> Squares:
    """Materialise the gradients tile by tile."""
    by_products = partial(_square_product_tiles, x_BTd, g_BTp)
    if is_fused(x_BTd) and is_faster(Way.TILED_PRODUCT, x_BTd, g_BTp, by_products):
        squares_B = launch(product_squares, x_BTd, g_BTp)
    else:
        squares_B = by_products()
    return Squares(squares_B, None, size_of(square(x_BTd), square(g_BTp)))


def _square_product_tiles(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    B, _, d = x_BTd.shape
    accumulator = accumulator_of(x_BTd.dtype)
    high, wide = PRODUCT_TILE
    squares_B = x_BTd.new_zeros(B, dtype=accumulator)
    at_once = samples_at_once(B, high * wide, (high + wide) * REDUCED_SLICE, x_BTd.dtype)
    for some in spans(B, at_once):
        xT, g = x_BTd[some].transpose(1, 2), g_BTp[some]
        for rows in spans(d, high):
            for columns in spans(g_BTp.shape[2], wide):
                tile = multiply(xT[:, rows], g[:, :, columns])
                squares_B[some] += square(tile)
    return squares_B


WAYS: dict[Way, Callable[[Tensor, Tensor], GramSums | Squares]] = {
    Way.TILED_GRAM: tiled_gram,
    Way.TILED_PRODUCT: tiled_product,
}


class Price(NamedTuple):
    """The cost of the norm of one per-sample gradient."""

    flops: int
    elements: int  # read and written: the operands of every tile, and its products

    def weigh(self, itemsize: int) -> int:
        """Return the whole cost in FLOPs."""
        return self.flops + FLOPS_PER_BYTE * self.elements * itemsize


class WayChoice(NamedTuple):
    """The way to a layer's norms, and why."""

    way: Way
    T: int
    d: int
    p: int
    flops: int  # the FLOPs of the matrix products for the norm of one sample
    prices: dict[Way, int]
    """``Price.weigh`` of each way; the cheapest is taken, unless gradients are kept. Layers of one
    shape share it."""


def price_gram(T: int, d: int, p: int) -> Price:
    """Price the tiled Gram way for one sample."""
    flops = elements = 0
    for rows, columns in _gram_panels(T):
        a, b = rows.stop - rows.start, columns.stop - columns.start
        flops += 2 * a * b * (d + p)
        elements += (a + b) * (d + p) + 4 * a * b
    return Price(flops, elements)


def price_product(T: int, d: int, p: int) -> Price:
    """Price the tiled product way for one sample."""
    high, wide = PRODUCT_TILE
    bands, stripes = -(-d // high), -(-p // wide)
    return Price(2 * T * d * p, T * (d * stripes + p * bands) + 2 * d * p)


@functools.lru_cache(4096)
def choose_way(
    T: int,
    d: int,
    p: int,
    itemsize: int,
    *,
    keeps: bool,
    on_tensor_cores: bool = False,
    becomes_sum: bool = False,
) -> WayChoice:
    """Choose the way to a layer's norms.

    T is the tokens of a sample, d and p the widths of input and output, ``itemsize`` the bytes of
    an element; ``keeps`` says whether contributions are kept for the weighted sum, and
    ``becomes_sum`` whether a kept gradient becomes the sum.
    """
    gram, product = price_gram(T, d, p), price_product(T, d, p)
    prices = {Way.TILED_GRAM: gram.weigh(itemsize), Way.TILED_PRODUCT: product.weigh(itemsize)}
    way = min(prices, key=lambda name: prices[name])
    flops = gram.flops if way is Way.TILED_GRAM else product.flops
    # Both ways to the sum take 2 T d p FLOPs.
    operands = itemsize * T * (d + p + 2 * min(d, p))
    of_norm = flops * (OF_GRAMS if way is Way.TILED_GRAM else 1)
    is_cheaper = ON_TENSOR_CORES * 12 * d * p <= of_norm + ON_TENSOR_CORES * operands
    is_smaller = d * p <= T * (d + p)
    if keeps and (becomes_sum or (is_smaller and (is_cheaper or not on_tensor_cores))):
        return WayChoice(Way.KEPT, T, d, p, product.flops, prices)
    return WayChoice(way, T, d, p, flops, prices)
