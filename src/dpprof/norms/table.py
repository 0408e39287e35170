"""Squared norms of the per-sample gradients of a lookup table.

A per-sample gradient has one row for each id: the sum of the output gradients at the positions of
the id. Positions with the same id share a number, at most T for each sample, and the norm is that
of the sums by number. No row of the table is needed, and no shape depends on the ids.

Shape legend: B samples, T tokens, d width of a row.
"""

import torch
from torch import Tensor

from dpprof.norms.rounding import Squares
from dpprof.norms.tiles import BATCHES, WORKSPACE_BYTES, accumulator_of, spans, square


def number_ids(ids_BT: Tensor) -> Tensor:
    """Number each position by the rank of its id among the sample's ids; (B, T) to (B, T)."""
    ordered_BT, order_BT = ids_BT.sort(dim=1)
    is_new_BT = torch.zeros_like(ids_BT)
    is_new_BT[:, 1:] = ordered_BT[:, 1:] != ordered_BT[:, :-1]
    return torch.empty_like(ids_BT).scatter_(1, order_BT, is_new_BT.cumsum(1))


def square_lookup(ids_BT: Tensor, g_BTd: Tensor) -> Squares:
    """Sum output gradients by id, as many columns at a time as the workspace holds.

    Returns:
        Squares in float32, or float64 for float64. An id sums at most T gradients, so rounding is
        relative to T times their squares.
    """
    B, T, d = g_BTd.shape
    accumulator = accumulator_of(g_BTd.dtype)
    first_B1 = torch.arange(B, device=ids_BT.device)[:, None] * T
    numbers_BT = number_ids(ids_BT) + first_B1
    squares_B = g_BTd.new_zeros(B, dtype=accumulator)
    room = WORKSPACE_BYTES // (2 * accumulator.itemsize * max(1, B * T))
    width = max(1, room, -(-d // BATCHES))
    for columns in spans(d, width):
        sums = torch.ops.aten.embedding_dense_backward(
            g_BTd[:, :, columns].to(accumulator), numbers_BT, B * T, -1, False
        )
        squares_B += square(sums.view(B, -1))
    return Squares(squares_B, None, T * square(g_BTd))
