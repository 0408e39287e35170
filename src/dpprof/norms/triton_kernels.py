"""Triton kernels for the norms of per-sample gradients.

Two kernels read the inputs X (T, d) and output gradients G (T, p) of a linear layer, and sum the
squares of each sample's weight gradient G^T X, tile by tile in float32, with each tile in
registers. A sample has ``slots`` programs: program i takes tiles i, i + slots, ... and writes its
sums to slot i, 0 if there is no tile for it. So results do not depend on the order of programs.

The third kernel computes the gradient of a normalisation's scale in one pass over its operands.

Shapes: T tokens, d in, p out; R, C a tile's rows and columns; K what a product sums over.
Strides are ``x_b``, ``x_t`` and ``x_k``, along samples, tokens and features, likewise ``g_b``.
"""

import triton
import triton.language as tl

from dpprof.norms.tuning import GRAM, INTERPRETED, PRODUCT, TUNING

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def load_tile(base, rows_R, row_stride, R, columns_C, column_stride, C):
    """Load elements (rows, columns) of a matrix (R, C), zero beyond its edges.

    Offsets have 64 bits: a view may span more than 2^31 elements.
    """
    offsets_RC = rows_R[:, None].to(tl.int64) * row_stride
    offsets_RC += columns_C[None, :].to(tl.int64) * column_stride
    inside_RC = (rows_R[:, None] < R) & (columns_C[None, :] < C)
    tile_RC = tl.load(base + offsets_RC, mask=inside_RC, other=0.0)
    if _INTERPRETED:
        # Triton's interpreter multiplies the bits of bfloat16 as integers (seen in 3.4 to 3.9).
        tile_RC = tile_RC.to(tl.float32)
    return tile_RC


@triton.jit
def gram_tile(
    base, T, K, token_stride, k_stride, rows_R, columns_C,
    TILE_T: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the Gram matrix of a matrix (T, K).

    A sum of K products has slices, so that its rounding is that of ``norms.rounding``. Tensor cores
    add at least 8 products at once; exact float32 products are added one after another.
    """
    SLICE: tl.constexpr = (
        128 if base.dtype.element_ty == tl.float32 and PRECISION == "ieee" else 1024
    )
    gram_RC = tl.zeros((TILE_T, TILE_T), dtype=tl.float32)
    for first in range(0, K, SLICE):
        slice_RC = tl.zeros((TILE_T, TILE_T), dtype=tl.float32)
        for start in range(first, tl.minimum(first + SLICE, K), TILE_K):
            k_K = start + tl.arange(0, TILE_K)
            left_RK = load_tile(base, rows_R, token_stride, T, k_K, k_stride, K)
            right_KC = load_tile(base, k_K, k_stride, K, columns_C, token_stride, T)
            slice_RC = tl.dot(left_RK, right_KC, slice_RC, input_precision=PRECISION)
        gram_RC += slice_RC
    return gram_RC


@triton.autotune(GRAM, **TUNING)
@triton.jit
def sum_gram_squares(
    x_ptr, g_ptr, partial_ptr, slots, T, d, p,
    x_b, x_t, x_k, g_b, g_t, g_k,
    T_rounded, d_rounded, p_rounded,
    PRECISION: tl.constexpr, TILE_T: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Sum (x_t . x_s) (g_t . g_s) over the tiles of (t, s) on and below the diagonal.

    Also x_t . x_t and g_t . g_t, then (x_t . x_s)^2 and (g_t . g_s)^2, each stored after the sums
    of all programs.
    """
    sample = (tl.program_id(0) // slots).to(tl.int64)
    slot = tl.program_id(0) % slots
    side = tl.cdiv(T, TILE_T)
    total = 0.0
    trace_x = 0.0
    trace_g = 0.0
    total_x = 0.0
    total_g = 0.0
    for tile in range(slot, side * (side + 1) // 2, slots):
        # The triangle's row i from below has side - i tiles, row i from above has i + 1. Together
        # they fill one row of a rectangle of side + 1 columns; an odd side fills half of the last.
        i = tile // (side + 1)
        j = tile % (side + 1)
        row = tl.where(j < side - i, side - 1 - i, i)
        column = tl.where(j < side - i, j, j - (side - i))
        rows_R = row * TILE_T + tl.arange(0, TILE_T)
        columns_C = column * TILE_T + tl.arange(0, TILE_T)
        x_RC = gram_tile(
            x_ptr + sample * x_b, T, d, x_t, x_k, rows_R, columns_C, TILE_T, TILE_K, PRECISION
        )
        g_RC = gram_tile(
            g_ptr + sample * g_b, T, p, g_t, g_k, rows_R, columns_C, TILE_T, TILE_K, PRECISION
        )
        is_diagonal_RC = rows_R[:, None] == columns_C[None, :]
        trace_x += tl.sum(tl.where(is_diagonal_RC, x_RC, 0.0))
        trace_g += tl.sum(tl.where(is_diagonal_RC, g_RC, 0.0))
        times = tl.where(row == column, 1.0, 2.0)
        total += times * tl.sum(x_RC * g_RC)
        total_x += times * tl.sum(x_RC * x_RC)
        total_g += times * tl.sum(g_RC * g_RC)
    programs = tl.num_programs(0)
    tl.store(partial_ptr + tl.program_id(0), total)
    tl.store(partial_ptr + programs + tl.program_id(0), trace_x)
    tl.store(partial_ptr + 2 * programs + tl.program_id(0), trace_g)
    tl.store(partial_ptr + 3 * programs + tl.program_id(0), total_x)
    tl.store(partial_ptr + 4 * programs + tl.program_id(0), total_g)


@triton.autotune(PRODUCT, **TUNING)
@triton.jit
def sum_product_squares(
    x_ptr, g_ptr, partial_ptr, slots, T, d, p,
    x_b, x_t, x_k, g_b, g_t, g_k,
    T_rounded, d_rounded, p_rounded,
    PRECISION: tl.constexpr,
    TILE_D: tl.constexpr, TILE_P: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Sum the squares of X^T G, (d, p), over its tiles."""
    sample = (tl.program_id(0) // slots).to(tl.int64)
    slot = tl.program_id(0) % slots
    height = tl.cdiv(d, TILE_D)
    total = 0.0
    for tile in range(slot, height * tl.cdiv(p, TILE_P), slots):
        d_R = tile % height * TILE_D + tl.arange(0, TILE_D)
        p_C = tile // height * TILE_P + tl.arange(0, TILE_P)
        product_RC = tl.zeros((TILE_D, TILE_P), dtype=tl.float32)
        for start in range(0, T, TILE_K):
            t_K = start + tl.arange(0, TILE_K)
            x_RK = load_tile(x_ptr + sample * x_b, d_R, x_k, d, t_K, x_t, T)
            g_KC = load_tile(g_ptr + sample * g_b, t_K, g_t, T, p_C, g_k, p)
            product_RC = tl.dot(x_RK, g_KC, product_RC, input_precision=PRECISION)
        total += tl.sum(product_RC * product_RC)
    tl.store(partial_ptr + tl.program_id(0), total)


@triton.jit
def sum_scaled(
    x_ptr, g_ptr, mean_ptr, rstd_ptr, partial_ptr, slots, T, d,
    x_b, x_t, x_k, g_b, g_t, g_k,
    CENTRED: tl.constexpr, SHIFTED: tl.constexpr, TILE_T: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Sum g (x - mean) rstd over tokens; each program writes TILE_D sums to its slot.

    Where ``SHIFTED`` it writes the sums of g behind the d sums of the slot.
    Means and rstd are contiguous, (B, T). Program i of a sample's ``slots`` takes token tiles i,
    i + slots, ...
    """
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    d_D = tl.program_id(2) * TILE_D + tl.arange(0, TILE_D)
    sums_TD = tl.zeros((TILE_T, TILE_D), dtype=tl.float32)
    shifts_TD = tl.zeros((TILE_T, TILE_D), dtype=tl.float32)
    for start in range(slot * TILE_T, T, slots * TILE_T):
        t_T = start + tl.arange(0, TILE_T)
        x_TD = load_tile(x_ptr + sample * x_b, t_T, x_t, T, d_D, x_k, d).to(tl.float32)
        g_TD = load_tile(g_ptr + sample * g_b, t_T, g_t, T, d_D, g_k, d).to(tl.float32)
        rstd_T = tl.load(rstd_ptr + sample * T + t_T, mask=t_T < T, other=0.0)
        if CENTRED:
            mean_T = tl.load(mean_ptr + sample * T + t_T, mask=t_T < T, other=0.0)
            x_TD = x_TD - mean_T[:, None]
        sums_TD += g_TD * (x_TD * rstd_T[:, None])
        if SHIFTED:
            shifts_TD += g_TD
    at = (sample * slots + slot) * d * (2 if SHIFTED else 1)
    tl.store(partial_ptr + at + d_D, tl.sum(sums_TD, axis=0), mask=d_D < d)
    if SHIFTED:
        tl.store(partial_ptr + at + d + d_D, tl.sum(shifts_TD, axis=0), mask=d_D < d)
