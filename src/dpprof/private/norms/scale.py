"""Computes the per-sample gradients of a normalisation's scale and shift, two vectors a sample.

The normalised inputs, which are large, are computed for some tokens at a time, or never stored in
Triton's kernel on CUDA.

Shape legend: B samples, T tokens, d width.
"""

from torch import Tensor

from dpprof.private.norms import placement, triton_ops
from dpprof.private.norms.tiles import TOKEN_PARTS, UNDIVIDED, accumulator_of, square


def scale_gradients(
    x_BTd: Tensor,
    g_BTd: Tensor,
    mean_BT1: Tensor | None,
    rstd_BT1: Tensor,
    *,
    shifted: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sum ``g * (x - mean) * rstd`` over tokens; (B, d) in float32, or float64 for float64.

    ``rstd_BT1`` are reciprocal standard deviations; the means are None if none were subtracted.
    If ``shifted`` it returns also the sums of ``g``, (B, d), where the kernel gives them
    without another pass; and the squares of all terms, (B,), except on CUDA.
    """
    B, T, d = x_BTd.shape
    if triton_ops.is_fused(x_BTd):
        mean_BT = None if mean_BT1 is None else mean_BT1.squeeze(2)
        operands = (x_BTd, g_BTd, mean_BT, rstd_BT1.squeeze(2), shifted)
        made_BRd = triton_ops.launch(triton_ops.scale_gradients, *operands)
        return made_BRd[:, 0], made_BRd[:, 1] if shifted else None, None
    on_gpu = placement.is_cuda(x_BTd)
    parts_of_T = 1 if on_gpu or T * d <= UNDIVIDED else TOKEN_PARTS
    accumulator = accumulator_of(x_BTd.dtype)
    means = None if mean_BT1 is None else mean_BT1.chunk(parts_of_T, dim=1)
    parts = zip(x_BTd.chunk(parts_of_T, dim=1), rstd_BT1.chunk(parts_of_T, dim=1), strict=True)
    sums_Bd = x_BTd.new_zeros((B, d), dtype=accumulator)
    squares_B = None if on_gpu else x_BTd.new_zeros(B, dtype=accumulator)
    for part, ((x, rstd), g) in enumerate(zip(parts, g_BTd.chunk(parts_of_T, dim=1), strict=True)):
        exact = x.to(accumulator)
        normal = exact * rstd if means is None else (exact - means[part]).mul_(rstd)
        sums_Bd += normal.mul_(g).sum(1)
        if squares_B is not None:
            squares_B += square(normal)
    return sums_Bd, None, squares_B
