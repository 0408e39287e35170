"""What two uses of one matrix have in common: as a lookup table, and to multiply tokens with.

The gradient of a matrix that is used twice is the sum of two gradients, and the squared norm
of a sum needs their inner product: the sum over places t of the lookup and tokens s of the
product of ``(e_t . x_s) g_s[id_t]``, taken in tiles.

Shape legend: B samples, T places looked up, S tokens multiplied, d width of a row, V rows.
"""

import torch
from torch import Tensor

from dpprof.norms.tiles import accumulator_of, multiply, spans, use_up

TILE = 256
"""Places and tokens in a tile."""


def inner_product(ids_BT: Tensor, e_BTd: Tensor, x_BSd: Tensor, g_BSV: Tensor) -> Tensor:
    """Multiply a table's gradient with a matrix's gradient, and sum.

    Args:
        ids_BT: Which row each place looked up.
        e_BTd: Gradient of what the lookup returned.
        x_BSd: What the matrix was multiplied with.
        g_BSV: Gradient of what came of it.

    Returns:
        (B,) in float32, or float64 for float64.
    """
    B, T, _ = e_BTd.shape
    dtype = torch.promote_types(e_BTd.dtype, x_BSd.dtype)
    sums_B = e_BTd.new_zeros(B, dtype=accumulator_of(dtype))
    for sample in range(B):
        one = slice(sample, sample + 1)
        for places in spans(T, TILE):
            for tokens in spans(x_BSd.shape[1], TILE):
                likeness = multiply(
                    e_BTd[one, places].to(sums_B.dtype),
                    x_BSd[one, tokens].to(sums_B.dtype).transpose(1, 2),
                )
                rows = g_BSV[sample, tokens].index_select(1, ids_BT[sample, places])
                sums_B[one] += use_up(likeness, rows.to(sums_B.dtype).t()[None])
    return sums_B
