"""Squared norms of the per-sample gradients of a matrix that tokens are multiplied with.

The gradient of sample b is the sum over its tokens of the outer product of the gradient of
the layer's output and the layer's input, ``g_b^T x_b``. Four ways to its squared norm:

* ``materialised``: make it. Goodfellow 2015, "Efficient per-example gradient computations",
  is the case of one token, where the norm is a product of two norms.
* ``gram``: the sum over pairs of tokens of ``(x_t . x_s)(g_t . g_s)`` from two T x T matrices
  (Li et al. 2022, "Large Language Models Can Be Strong Differentially Private Learners",
  section 4).
* ``tiled gram``: the same in tiles, only those on and below the diagonal, since both matrices
  are symmetric.
* ``tiled product``: the gradient in tiles of d x p, each reduced to a number before the next.

The tiled ones take at most ``WORKSPACE_BYTES``, whatever T, d and p are; on CUDA, where Triton
is installed, they are kernels that keep their tiles in registers (``norms.kernels``).

Shape legend: B samples, T tokens, d width of the input, p width of the output. All take
``x_BTd`` and ``g_BTp`` and return (B,) in float32 (float64 for float64).
"""

from collections.abc import Callable

from torch import Tensor

from dpprof.norms.fused import gram_squares, is_fused, product_squares
from dpprof.norms.tiles import (
    REDUCED_SLICE,
    accumulator_of,
    multiply,
    samples_at_once,
    spans,
    square,
    use_up,
)

PRODUCT_TILE = (256, 512)
"""Rows (of d) and columns (of p) of a tile."""

Squares = Callable[[Tensor, Tensor], Tensor]


GRAM_TILE = 256
"""Tokens that a tile spans; half of it where there would be a single tile, and none left out."""


def gram_tile(T: int) -> int:
    """Say how many tokens a tile spans."""
    return GRAM_TILE if T > GRAM_TILE else GRAM_TILE // 2


def materialised(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Make the gradient of every sample: B d p elements."""
    return square(multiply(x_BTd.transpose(1, 2), g_BTp))


def gram(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Make both Gram matrices of every sample: 2 B T^2 elements."""
    return use_up(multiply(x_BTd, x_BTd.transpose(1, 2)), multiply(g_BTp, g_BTp.transpose(1, 2)))


def tiled_gram(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Multiply Gram matrices tile by tile."""
    if is_fused(x_BTd):
        squares: Tensor = gram_squares(x_BTd, g_BTp)
        return squares
    B, T, _ = x_BTd.shape
    accumulator = accumulator_of(x_BTd.dtype)
    tile = gram_tile(T)
    squares_B = x_BTd.new_zeros(B, dtype=accumulator)
    at_once = samples_at_once(B, 2 * tile * tile, 2 * tile * REDUCED_SLICE, x_BTd.dtype)
    for some in spans(B, at_once):
        x, g = x_BTd[some], g_BTp[some]
        for rows in spans(T, tile):
            for columns in spans(rows.stop, tile):
                part = _gram_tile(x, g, rows, columns)
                squares_B[some] += part if columns == rows else 2 * part
    return squares_B


def _gram_tile(x_BTd: Tensor, g_BTp: Tensor, rows: slice, columns: slice) -> Tensor:
    of_inputs = multiply(x_BTd[:, rows], x_BTd[:, columns].transpose(1, 2))
    of_gradients = multiply(g_BTp[:, rows], g_BTp[:, columns].transpose(1, 2))
    return use_up(of_inputs, of_gradients)


def tiled_product(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Make the gradients tile by tile."""
    if is_fused(x_BTd):
        squares: Tensor = product_squares(x_BTd, g_BTp)
        return squares
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


WAYS: dict[str, Squares] = {
    "materialised": materialised,
    "gram": gram,
    "tiled gram": tiled_gram,
    "tiled product": tiled_product,
}
