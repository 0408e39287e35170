"""The inner product of two gradients of one matrix: as a lookup table and as a weight.

The gradient of a tied matrix is the sum of both, and the squared norm of a sum needs their inner
product: the sum over lookup positions t and tokens s of ``(e_t . x_s) g_s[id_t]``, in tiles.

Shape legend: B samples, T lookup positions, S tokens, d width of a row, V rows.
"""

import torch
from torch import Tensor

from dpprof.norms.rounding import Squares, depth_of_tile
from dpprof.norms.tiles import accumulator_of, multiply, multiply_and_sum, spans, square

TILE = 256
"""Positions, and tokens, in a tile."""


def inner_product(ids_BT: Tensor, e_BTd: Tensor, x_BSd: Tensor, g_BSV: Tensor) -> Squares:
    """Compute the inner product of both gradients of each sample.

    ``e_BTd`` are output gradients of the lookup, ``g_BSV`` those of the weight.

    Returns:
        The products as ``found``, in float32, or float64 for float64. As for Gram matrices
        (``norms.rounding``), the error of E X^T is at most d u |E| |X| in the Frobenius norm, so
        ``slack`` is that times the norm of the rows.
    """
    B, T, d = e_BTd.shape
    S = x_BSd.shape[1]
    dtype = accumulator_of(torch.promote_types(e_BTd.dtype, x_BSd.dtype))
    sums_3B = e_BTd.new_zeros((3, B), dtype=torch.float64)
    for sample in range(B):
        one = slice(sample, sample + 1)
        for positions in spans(T, TILE):
            for tokens in spans(S, TILE):
                products = multiply(
                    e_BTd[one, positions].to(dtype), x_BSd[one, tokens].to(dtype).transpose(1, 2)
                )
                rows = g_BSV[sample, tokens].index_select(1, ids_BT[sample, positions])
                rows = rows.to(dtype).t()[None]
                both = (products, rows)
                squares = [torch.linalg.vector_norm(one, dim=(1, 2)).square_() for one in both]
                sums_3B[:, one] += torch.stack([multiply_and_sum(products, rows), *squares])
    found_B, products_B, rows_B = sums_3B.to(dtype)
    depth = depth_of_tile(TILE)
    error_B = d * (square(e_BTd) * square(x_BSd)).sqrt() + depth * products_B.sqrt()
    slack_B = torch.finfo(dtype).eps * error_B * rows_B.sqrt()
    return Squares(found_B, slack_B, None)
