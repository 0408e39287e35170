"""Triton kernels for the norms of per-sample gradients.

Two kernels read the inputs X (T, d) and output gradients G (T, p) of a linear layer, and sum the
squares of each sample's weight gradient G^T X, tile by tile in float32, with each tile in
registers. A sample has ``slots`` programs: program i takes tiles i, i + slots, ... and writes its
sums to slot i, 0 if there is no tile for it. So results do not depend on the order of programs.

Shapes: T tokens, d in, p out; R, C a tile's rows and columns; K what a product sums over.
Strides are ``x_b``, ``x_t`` and ``x_k``, along samples, tokens and features, likewise ``g_b``.
"""

import triton
import triton.language as tl

from dpprof.private.norms.tuning import GRAM, INTERPRETED, PRODUCT, TUNING

_INTERPRETED = tl.constexpr(INTERPRETED)
HALVED = tl.constexpr(32 if INTERPRETED else 128)  # tokens of a tile that may be halved


@triton.jit
def multiply(
    left_R, in_R, left_stride, right_C, in_C, right_stride, K,
    R: tl.constexpr, C: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows of one matrix by rows of another; (R, C).

    ``left_R`` and ``right_C`` point at the first of the K elements of each row. Rows that are not
    in ``in_R`` or ``in_C`` are zero, but where ``EVEN`` every row is read; K is a multiple of
    TILE_K then.

    Where ``SLICE`` is not None, a sum has slices of so many products, and the rounding that
    ``norms.rounding`` says.
    One loop goes over all slices: the loads of the next one begin before this one ends.
    """
    k_K = tl.arange(0, TILE_K)
    left_RK = left_R[:, None] + k_K[None, :].to(tl.int64) * left_stride
    right_KC = right_C[None, :] + k_K[:, None].to(tl.int64) * right_stride
    wide = tl.full((), TILE_K, tl.int64)  # a step may go over more than 2^31 elements
    sum_RC = tl.zeros((R, C), dtype=tl.float32)
    slice_RC = tl.zeros((R, C), dtype=tl.float32)
    for step in range(tl.cdiv(K, TILE_K)):
        if EVEN:
            a_RK = tl.load(left_RK)
            b_KC = tl.load(right_KC)
        else:
            in_K = k_K < K - step * TILE_K
            a_RK = tl.load(left_RK, mask=in_R[:, None] & in_K[None, :], other=0.0)
            b_KC = tl.load(right_KC, mask=in_K[:, None] & in_C[None, :], other=0.0)
        if _INTERPRETED:
            # Triton's interpreter multiplies the bits of bfloat16 as integers (seen in 3.4 to 3.9).
            a_RK = a_RK.to(tl.float32)
            b_KC = b_KC.to(tl.float32)
        slice_RC = tl.dot(a_RK, b_KC, slice_RC, input_precision=PRECISION)
        left_RK += wide * left_stride
        right_KC += wide * right_stride
        if SLICE is not None:  # noqa: SIM102 (Triton decides this one as it compiles)
            if step % (SLICE // TILE_K) == SLICE // TILE_K - 1:
                sum_RC += slice_RC
                slice_RC = tl.zeros((R, C), dtype=tl.float32)
    return sum_RC + slice_RC if SLICE is not None else slice_RC


@triton.jit
def multiply_blocks(
    matrix, row, column, K,
    R: tl.constexpr, C: tl.constexpr, TILE_K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Multiply rows of a matrix by others of its rows, as ``multiply``; (R, C).

    ``matrix`` is a tensor descriptor, whose blocks the GPU's copy engine loads; zero beyond K.
    """
    sum_RC = tl.zeros((R, C), dtype=tl.float32)
    slice_RC = tl.zeros((R, C), dtype=tl.float32)
    for step in range(tl.cdiv(K, TILE_K)):
        a_RK = matrix.load([row, step * TILE_K])
        b_CK = matrix.load([column, step * TILE_K])
        if _INTERPRETED:
            a_RK = a_RK.to(tl.float32)
            b_CK = b_CK.to(tl.float32)
        slice_RC = tl.dot(a_RK, b_CK.T, slice_RC, input_precision="ieee")
        if step % (SLICE // TILE_K) == SLICE // TILE_K - 1:
            sum_RC += slice_RC
            slice_RC = tl.zeros((R, C), dtype=tl.float32)
    return sum_RC + slice_RC


@triton.jit
def square_grams(
    x, g, first, row, column, T, d, p, x_t, x_k, g_t, g_k,
    R: tl.constexpr, C: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    SLICE: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Sum A * B over a tile, the diagonals of A and B, A^2 and B^2; A = X X^T and B = G G^T.

    ``x`` and ``g`` point at a sample, or describe all, of which ``first`` is the sample's first
    row; ``row`` and ``column`` are the tile's first.
    """
    rows_R = row + tl.arange(0, R)
    columns_C = column + tl.arange(0, C)
    in_R = rows_R < T
    in_C = columns_C < T
    # Beyond the edge any token will do: what comes of it is not counted.
    if DESCRIBED:
        x_RC = multiply_blocks(x, first + row, first + column, d, R, C, TILE_K, SLICE)
        g_RC = multiply_blocks(g, first + row, first + column, p, R, C, TILE_K, SLICE)
    else:
        t_R = tl.minimum(rows_R, T - 1).to(tl.int64)
        t_C = tl.minimum(columns_C, T - 1).to(tl.int64)
        x_RC = multiply(
            x + t_R * x_t, in_R, x_k, x + t_C * x_t, in_C, x_k, d,
            R, C, TILE_K, EVEN, SLICE, PRECISION,
        )  # fmt: skip
        g_RC = multiply(
            g + t_R * g_t, in_R, g_k, g + t_C * g_t, in_C, g_k, p,
            R, C, TILE_K, EVEN, SLICE, PRECISION,
        )  # fmt: skip
    inside_RC = in_R[:, None] & in_C[None, :]
    x_RC = tl.where(inside_RC, x_RC, 0.0)
    g_RC = tl.where(inside_RC, g_RC, 0.0)
    is_diagonal_RC = rows_R[:, None] == columns_C[None, :]
    return (
        tl.sum(x_RC * g_RC),
        tl.sum(tl.where(is_diagonal_RC, x_RC, 0.0)),
        tl.sum(tl.where(is_diagonal_RC, g_RC, 0.0)),
        tl.sum(x_RC * x_RC),
        tl.sum(g_RC * g_RC),
    )


@triton.jit
def place_program(samples, slots, whole, jobs):
    """Return this program's sample and slot: whole tiles first, then halves, then none."""
    program = tl.program_id(0)
    sample = program // slots
    slot = program % slots
    if jobs <= slots:
        after = program - samples * whole
        parts = tl.maximum(jobs - whole, 1)
        rest = tl.maximum(slots - jobs, 1)
        if after < 0:
            sample = program // whole
            slot = program % whole
        elif after < samples * (jobs - whole):
            sample = after // parts
            slot = whole + after % parts
        else:
            after -= samples * (jobs - whole)
            sample = after // rest
            slot = jobs + after % rest
    return sample.to(tl.int64), slot


@triton.autotune(GRAM, **TUNING)
@triton.heuristics({"EVEN": lambda a: a["d"] % a["TILE_K"] == a["p"] % a["TILE_K"] == 0})
@triton.jit(do_not_specialize=["processors"])
def sum_gram_squares(
    x_ptr, g_ptr, partial_ptr, slots, T, d, p,
    x_b, x_t, x_k, g_b, g_t, g_k,
    T_rounded, d_rounded, p_rounded,
    processors, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    TILE_T: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum (x_t . x_s) (g_t . g_s) over the tiles of (t, s) on and below the diagonal.

    Also x_t . x_t and g_t . g_t, then (x_t . x_s)^2 and (g_t . g_s)^2, each stored after the sums
    of all programs.

    Tensor cores add at least 8 products at once; exact float32 products are added one after
    another.

    A processor has room for one large tile. Where few of them would be left for the last round, and
    most processors idle, these are cut in halves, one for each processor.

    Where ``DESCRIBED``, tensor descriptors of 16-bit numbers, (B T, d) and (B T, p), are in the
    place of pointers, and no tile is halved: blocks have one size.
    """
    ON_SCALARS: tl.constexpr = (
        False if DESCRIBED else x_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee"
    )
    SLICE: tl.constexpr = 128 if ON_SCALARS else 1024
    HALVES: tl.constexpr = TILE_T >= HALVED and not DESCRIBED
    samples = tl.num_programs(0) // slots
    side = tl.cdiv(T, TILE_T)
    tiles = side * (side + 1) // 2
    halved = 0
    if HALVES and tiles * samples > processors:
        halved = tl.cdiv(tiles * samples % processors, samples)
        if 2 * halved * samples > processors:
            halved = 0
    whole = tiles - halved
    jobs = whole + 2 * halved
    sample, slot = place_program(samples, slots, whole, jobs)
    x = x_ptr if DESCRIBED else x_ptr + sample * x_b
    g = g_ptr if DESCRIBED else g_ptr + sample * g_b
    first = (sample * T).to(tl.int32)
    total = 0.0
    trace_x = 0.0
    trace_g = 0.0
    total_x = 0.0
    total_g = 0.0
    for job in range(slot, jobs, slots):
        tile = tl.where(job < whole, job, whole + (job - whole) // 2)
        # The triangle's row i from below has side - i tiles, row i from above has i + 1. Together
        # they fill one row of a rectangle of side + 1 columns; an odd side fills half of the last.
        i = tile // (side + 1)
        j = tile % (side + 1)
        row = tl.where(j < side - i, side - 1 - i, i)
        column = tl.where(j < side - i, j, j - (side - i))
        times = tl.where(row == column, 1.0, 2.0)
        if HALVES and job >= whole:
            both, of_x, of_g, squares_x, squares_g = square_grams(
                x, g, first, row * TILE_T + (job - whole) % 2 * (TILE_T // 2), column * TILE_T,
                T, d, p, x_t, x_k, g_t, g_k,
                TILE_T // 2, TILE_T, TILE_K, EVEN, SLICE, PRECISION, DESCRIBED,
            )  # fmt: skip
        else:
            both, of_x, of_g, squares_x, squares_g = square_grams(
                x, g, first, row * TILE_T, column * TILE_T,
                T, d, p, x_t, x_k, g_t, g_k,
                TILE_T, TILE_T, TILE_K, EVEN, SLICE, PRECISION, DESCRIBED,
            )  # fmt: skip
        total += times * both
        trace_x += of_x
        trace_g += of_g
        total_x += times * squares_x
        total_g += times * squares_g
    programs = tl.num_programs(0)
    at = partial_ptr + sample * slots + slot
    tl.store(at, total)
    tl.store(at + programs, trace_x)
    tl.store(at + 2 * programs, trace_g)
    tl.store(at + 3 * programs, total_x)
    tl.store(at + 4 * programs, total_g)


@triton.autotune(PRODUCT, **TUNING)
@triton.heuristics(
    {"EVEN": lambda a: not (a["T"] % a["TILE_K"] or a["d"] % a["TILE_D"] or a["p"] % a["TILE_P"])}
)
@triton.jit
def sum_product_squares(
    x_ptr, g_ptr, partial_ptr, slots, T, d, p,
    x_b, x_t, x_k, g_b, g_t, g_k,
    T_rounded, d_rounded, p_rounded,
    PRECISION: tl.constexpr,
    TILE_D: tl.constexpr, TILE_P: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum the squares of X^T G, (d, p), over its tiles."""
    sample = (tl.program_id(0) // slots).to(tl.int64)
    slot = tl.program_id(0) % slots
    height = tl.cdiv(d, TILE_D)
    total = 0.0
    for tile in range(slot, height * tl.cdiv(p, TILE_P), slots):
        d_R = tile % height * TILE_D + tl.arange(0, TILE_D)
        p_C = tile // height * TILE_P + tl.arange(0, TILE_P)
        product_RC = multiply(
            x_ptr + sample * x_b + d_R.to(tl.int64) * x_k, d_R < d, x_t,
            g_ptr + sample * g_b + p_C.to(tl.int64) * g_k, p_C < p, g_t,
            T, TILE_D, TILE_P, TILE_K, EVEN, None, PRECISION,
        )  # fmt: skip
        total += tl.sum(product_RC * product_RC)
    tl.store(partial_ptr + tl.program_id(0), total)
