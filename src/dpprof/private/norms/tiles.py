"""Products and sums in tiles, so that the workspace is bounded for any shape."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpprof.private.allocation_marks import allocates_for_its_caller
from dpprof.private.norms import placement

WORKSPACE_BYTES = 8 * 2**20
"""The most memory that the norm of a matrix may take in addition to its arguments and result, for
any T, d and p. A tile of one sample is smaller; as many samples are processed at a time as fit. For
more than ``BATCHES`` times as many samples it grows with their number."""

BATCHES = 16
"""The most parts into which samples, or columns of a lookup table, are split: each part is a kernel
launch for every tile."""

TOKEN_PARTS = 4
"""Parts into which the tokens of a normalisation are split; one needs one or two parts of its
input as workspace."""

UNDIVIDED = 2**13  # the most elements of a sample of a normalisation's input that is not split
REDUCED_SLICE = 512  # terms of a sum of products that are cast to float32 at a time
SUMMED_SLICE = 128  # terms of an entry of a Gram matrix that a library adds up in any order

SQUARED_AT_ONCE = 2**17
"""Elements of a sample whose squares PyTorch sums in one call. It adds them one after another, so
rounding grows with their number: here to 1e-6 of the sum in float32."""


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of products: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def may_weigh(x: Tensor) -> bool:
    """Tell whether the weighted operand of a sum keeps its dtype; else it is cast to float32.

    On CUDA bfloat16 does: its range is float32's. A weighted operand in float16 could vanish, and
    its rounding error would not be relative to it.
    """
    is_wide = placement.is_cuda(x) and x.dtype is torch.bfloat16
    return is_wide or x.dtype == accumulator_of(x.dtype)


def spans(total: int, size: int) -> Iterator[slice]:
    """Split ``range(total)`` into slices of at most ``size``."""
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


@allocates_for_its_caller
def multiply(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Multiply the matrices of each sample; (B, M, K) and (B, K, N) to (B, M, N).

    A GPU's tensor cores multiply 16-bit operands with a float32 result. Elsewhere slices of them
    are cast to float32: exact as in float32, with little more memory than the result.
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


@allocates_for_its_caller
def multiply_in_slices(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Multiply the matrices of each sample, adding up slices (``norms.rounding``) of K."""
    if a_BMK.shape[2] <= SUMMED_SLICE:
        return multiply(a_BMK, b_BKN)
    first_a, *more_a = torch.split(a_BMK, SUMMED_SLICE, 2)
    first_b, *more_b = torch.split(b_BKN, SUMMED_SLICE, 1)
    product_BMN = multiply(first_a, first_b)
    for a, b in zip(more_a, more_b, strict=True):
        if a.dtype == b.dtype == product_BMN.dtype:
            product_BMN.baddbmm_(a, b)
        else:
            product_BMN += multiply(a, b)
    return product_BMN


def samples_at_once(B: int, results: int, operands: int, dtype: torch.dtype) -> int:
    """Return how many of B samples to process at a time: equal parts that the workspace holds.

    One sample has ``results`` elements of products at once, and ``operands`` elements of slices
    that are cast to float32 unless their dtype needs no cast.
    """
    accumulator = accumulator_of(dtype)
    elements = results + (0 if dtype == accumulator else operands)
    at_once = WORKSPACE_BYTES // max(1, elements * accumulator.itemsize)
    most = max(1, at_once, -(-B // BATCHES))
    parts = max(1, -(-B // most))
    return max(1, -(-B // parts))


def multiply_and_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum the elementwise products of each sample, overwriting ``a``; two of (B, ...) to (B,).

    PyTorch sums pairwise. One long dot product in float32 would be wrong in the third digit at two
    million elements.
    """
    return a.mul_(b).flatten(1).sum(1)


def square(a: Tensor) -> Tensor:
    """Sum each sample's squares, in float32 at least, without storing them; (B, ...) to (B,)."""
    flat = a.flatten(1)
    accumulator = accumulator_of(a.dtype)
    # A GPU sums in a tree anyway, and each slice is a launch.
    size = max(1, flat.shape[1]) if placement.is_cuda(a) else SQUARED_AT_ONCE
    if 0 < flat.shape[1] <= size:
        squares_B: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=accumulator).square_()
        return squares_B
    parts = [
        torch.linalg.vector_norm(flat[:, some], dim=1, dtype=accumulator).square_()
        for some in spans(flat.shape[1], size)
    ]
    return sum(parts[1:], parts[0]) if parts else a.new_zeros(len(a), dtype=accumulator)
