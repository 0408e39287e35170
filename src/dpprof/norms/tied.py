"""What two uses of one matrix have in common: as a lookup table, and to multiply tokens with.

The gradient of a matrix that is used twice is the sum of two gradients, and the squared norm
of a sum needs their inner product: the sum over places t of the lookup and tokens s of the
product of ``(e_t . x_s) g_s[id_t]``, taken in tiles.

Shape legend: B samples, T places looked up, S tokens multiplied, d width of a row, V rows.
"""

import torch
from torch import Tensor

from dpprof.norms.rounding import Squares, depth_of_tile
from dpprof.norms.tiles import accumulator_of, multiply, spans, square, use_up

TILE = 256
"""Places and tokens in a tile."""


def inner_product(ids_BT: Tensor, e_BTd: Tensor, x_BSd: Tensor, g_BSV: Tensor) -> Squares:
    """Multiply a table's gradient with a matrix's gradient, and sum.

    Args:
        ids_BT: Which row each place looked up.
        e_BTd: Gradient of what the lookup returned.
        x_BSd: What the matrix was multiplied with.
        g_BSV: Gradient of what came of it.

    Returns:
        The products as ``found``, in float32, or float64 for float64. Likenesses are wrong by at
        most d u |E| |X| in the Frobenius norm, as Gram matrices are (``norms.rounding``), so
        ``slack`` is that times the norm of the rows.
    """
    B, T, d = e_BTd.shape
    S = x_BSd.shape[1]
    dtype = accumulator_of(torch.promote_types(e_BTd.dtype, x_BSd.dtype))
    sums_3B = e_BTd.new_zeros((3, B), dtype=torch.float64)
    for sample in range(B):
        one = slice(sample, sample + 1)
        for places in spans(T, TILE):
            for tokens in spans(S, TILE):
                likeness = multiply(
                    e_BTd[one, places].to(dtype), x_BSd[one, tokens].to(dtype).transpose(1, 2)
                )
                rows = g_BSV[sample, tokens].index_select(1, ids_BT[sample, places])
                rows = rows.to(dtype).t()[None]
                both = (likeness, rows)
                squares = [torch.linalg.vector_norm(one, dim=(1, 2)).square_() for one in both]
                sums_3B[:, one] += torch.stack([use_up(likeness, rows), *squares])
    found_B, likenesses_B, rows_B = sums_3B.to(dtype)
    depth = depth_of_tile(TILE)
    wrong_B = d * (square(e_BTd) * square(x_BSd)).sqrt() + depth * likenesses_B.sqrt()
    slack_B = torch.finfo(dtype).eps * wrong_B * rows_B.sqrt()
    return Squares(found_B, slack_B, None)
