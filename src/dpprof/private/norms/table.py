"""Squared norms of the per-sample gradients of a lookup table, which may be a weight too.

A per-sample gradient has one row for each id: the sum of the output gradients at the positions of
the id. Positions with the same id share a number, at most T for each sample, and the norm is that
of the sums by number. No row of the table is needed, and no shape depends on the ids.

The gradient of a tied matrix is the sum of that as a lookup table and that as a weight, and the
squared norm of a sum needs their inner product: the sum over lookup positions t and tokens s of
``(e_t . x_s) g_s[id_t]``, in tiles.

Shape legend: B samples, T lookup positions, S tokens of the weight, d width of a row, V rows.
"""

import torch
from torch import Tensor

from dpprof.private.norms import placement
from dpprof.private.norms.rounding import Squares, depth_of_products, depth_of_sum
from dpprof.private.norms.tiles import (
    BATCHES,
    WORKSPACE_BYTES,
    accumulator_of,
    multiply_and_sum,
    multiply_in_slices,
    samples_at_once,
    spans,
    square,
)

TILE = 256  # positions, and tokens, in a tile of an inner product
TILE_ON_GPU = 1024  # replaces ``TILE`` on a GPU, where each tile is some thirty launches

ON_GPU_BYTES = 64 * 2**20
"""Replaces ``WORKSPACE_BYTES`` on a GPU: PyTorch's sum by id sorts all positions for each part
again, which takes ten times as long as the sum itself (perf/measured_steps.md)."""


def number_ids(ids_BT: Tensor) -> Tensor:
    """Number each position by the rank of its id among the sample's ids; (B, T) to (B, T)."""
    ordered_BT, order_BT = ids_BT.sort(dim=1)
    is_new_BT = torch.zeros_like(ids_BT)
    is_new_BT[:, 1:] = ordered_BT[:, 1:] != ordered_BT[:, :-1]
    return torch.empty_like(ids_BT).scatter_(1, order_BT, is_new_BT.cumsum(1))


def square_lookup(ids_BT: Tensor, g_BTd: Tensor) -> Squares:
    """Sum output gradients by id, in as few equal parts of columns as the workspace asks for.

    Squares are in float32, or float64 for float64. An id sums at most T gradients, so rounding
    is relative to T times their squares.
    """
    B, T, d = g_BTd.shape
    accumulator = accumulator_of(g_BTd.dtype)
    first_B1 = torch.arange(B, device=ids_BT.device)[:, None] * T
    numbers_BT = number_ids(ids_BT) + first_B1
    squares_B = g_BTd.new_zeros(B, dtype=accumulator)
    workspace_bytes = ON_GPU_BYTES if placement.is_cuda(g_BTd) else WORKSPACE_BYTES
    parts = max(1, -(-2 * accumulator.itemsize * B * T * d // workspace_bytes))
    # Powers of two: no part is left with few columns, and few batches have steps of their own.
    parts = min(BATCHES, 1 << (parts - 1).bit_length())
    for columns in spans(d, max(1, -(-d // parts))):
        sums = torch.ops.aten.embedding_dense_backward(
            g_BTd[:, :, columns].to(accumulator), numbers_BT, B * T, -1, False
        )
        squares_B += square(sums.view(B, -1))
    return Squares(squares_B, None, T * square(g_BTd))


def inner_product(ids_BT: Tensor, e_BTd: Tensor, x_BSd: Tensor, g_BSV: Tensor) -> Squares:
    """Compute the inner product of both gradients of each sample.

    ``e_BTd`` are output gradients of the lookup, ``g_BSV`` those of the weight. Products are in
    float32, or float64 for float64. As for Gram matrices (``norms.rounding``), the error of E
    X^T is at most n(d) u |E| |X| in the Frobenius norm, so ``slack`` is that times the norm of
    the rows.
    """
    B, T, d = e_BTd.shape
    S = x_BSd.shape[1]
    dtype = accumulator_of(torch.promote_types(e_BTd.dtype, x_BSd.dtype))
    tile = TILE_ON_GPU if placement.is_cuda(e_BTd) else TILE
    sums_3B = e_BTd.new_zeros((3, B), dtype=torch.float64)
    at_once = samples_at_once(B, 2 * tile * tile, 2 * tile * d, e_BTd.dtype)
    for some in spans(B, at_once):
        for positions in spans(T, tile):
            ids = ids_BT[some, None, positions]
            for tokens in spans(S, tile):
                products = multiply_in_slices(
                    x_BSd[some, tokens].to(dtype), e_BTd[some, positions].to(dtype).transpose(1, 2)
                )
                rows = g_BSV[some, tokens]
                rows = rows.gather(2, ids.expand(-1, rows.shape[1], -1)).to(dtype)
                squares = [
                    torch.linalg.vector_norm(x, dim=(1, 2)).square_() for x in (products, rows)
                ]
                sums_3B[:, some] += torch.stack([multiply_and_sum(products, rows), *squares])
    found_B, products_B, rows_B = sums_3B.to(dtype)
    depth = depth_of_sum(tile * tile)
    size_B = square(e_BTd) * square(x_BSd)
    error_B = depth_of_products(d) * size_B.sqrt() + depth * products_B.sqrt()
    slack_B = torch.finfo(dtype).eps * error_B * rows_B.sqrt()
    return Squares(found_B, slack_B, None)
