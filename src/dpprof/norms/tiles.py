"""Work in tiles, so that memory stays bounded whatever the shapes are."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpprof.norms import placement
from dpprof.records.births import allocates_for_its_caller

WORKSPACE_BYTES = 8 * 2**20
"""What the norm of a matrix may take beside its arguments and its result, at most, however many
tokens and however wide the layer; a tile of one sample is smaller, and samples are taken few
enough at a time. Beyond ``BATCHES`` times as many samples it grows with their number."""

BATCHES = 16
"""In no more parts than this are samples taken, since each is a launch for every tile, and
columns of a lookup table."""

PARTS = 4
"""Into so many parts is the work for a vector divided, which takes as much as one part of the
layer's input does, or two."""

REDUCED_SLICE = 512
"""So much of a sum of products is taken at a time where operands are turned into float32."""


SQUARED_AT_ONCE = 2**17
"""Elements of a sample whose squares are summed in one go. PyTorch adds them up one after the
other, so rounding grows with their number: to 1e-6 of the sum in float32 here."""


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of products are kept: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def spans(total: int, size: int) -> Iterator[slice]:
    """Cut ``range(total)`` into pieces of at most ``size``."""
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


@allocates_for_its_caller
def multiply(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Multiply matrices of each sample; (B, M, K) and (B, K, N) to (B, M, N).

    Operands of reduced precision are multiplied into float32 by a GPU's tensor cores; elsewhere
    they are turned into float32 a slice at a time, so that a product is as exact as in float32
    and takes little more memory than its result.
    """
    accumulator = accumulator_of(a_BMK.dtype)
    if a_BMK.dtype == b_BKN.dtype == accumulator:
        return torch.bmm(a_BMK, b_BKN)
    if a_BMK.dtype == b_BKN.dtype and placement.is_cuda(a_BMK):
        return torch.bmm(a_BMK, b_BKN, out_dtype=accumulator)
    product_BMN = a_BMK.new_zeros(
        (a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2]), dtype=accumulator
    )
    for part in spans(a_BMK.shape[2], REDUCED_SLICE):
        product_BMN.baddbmm_(a_BMK[:, :, part].to(accumulator), b_BKN[:, part].to(accumulator))
    return product_BMN


def samples_at_once(B: int, results: int, operands: int, dtype: torch.dtype) -> int:
    """Say how many samples to take at a time: as many as the workspace has room for.

    Args:
        B: Samples in all.
        results: Elements of the products that are alive at once, for one sample.
        operands: Elements of slices that are turned into float32, where they have to be.
        dtype: Of the operands.
    """
    accumulator = accumulator_of(dtype)
    elements = results + (0 if dtype == accumulator else operands)
    return max(1, WORKSPACE_BYTES // (elements * accumulator.itemsize), -(-B // BATCHES))


def use_up(a: Tensor, b: Tensor) -> Tensor:
    """Sum the elementwise product of each sample, in place of ``a``; two of (B, ...) to (B,).

    PyTorch sums pairwise, so rounding does not grow with the number of elements as in one
    long dot product, whose float32 result is wrong in the third digit at two million.
    """
    return a.mul_(b).flatten(1).sum(1)


def square(a: Tensor) -> Tensor:
    """Sum the squares of each sample, allocating none of them; (B, ...) to (B,).

    Sums are float32 at least: squares of bfloat16 would stay within 8 bits.
    """
    flat = a.flatten(1)
    accumulator = accumulator_of(a.dtype)
    squares_B = a.new_zeros(len(a), dtype=accumulator)
    # A GPU adds up in a tree anyway, and each piece is a launch.
    size = max(1, flat.shape[1]) if placement.is_cuda(a) else SQUARED_AT_ONCE
    for some in spans(flat.shape[1], size):
        norms_B = torch.linalg.vector_norm(flat[:, some], dim=1, dtype=accumulator)
        squares_B += norms_B.square_()
    return squares_B
