"""Triton kernels for the norms of per-sample gradients.

Two kernels read the inputs X (T, d) and output gradients G (T, p) of a linear layer, and sum the
squares of each sample's weight gradient G^T X, tile by tile in float32, with each tile in
registers. A sample has ``slots`` programs: program i takes tiles i, i + slots, ... and writes its
sums to slot i, 0 if there is no tile for it. So results do not depend on the order of programs.

The third kernel computes the gradient of a normalisation's scale in one pass over its operands. The
fourth multiplies samples by weights, and the last adds noise to sums.

Shapes: T tokens, d in, p out; R, C a tile's rows and columns; K what a product sums over.
Strides are ``x_b``, ``x_t`` and ``x_k``, along samples, tokens and features, likewise ``g_b``.
"""

import triton
import triton.language as tl

from dpprof.private.norms.tuning import GRAM, INTERPRETED, PRODUCT, TUNING

_INTERPRETED = tl.constexpr(INTERPRETED)
HALVED = tl.constexpr(32 if INTERPRETED else 128)
"""Tokens of a tile that may be halved."""


@triton.jit
def load_tile(base, rows_R, row_stride, R, columns_C, column_stride, C):
    """Load elements (rows, columns) of a matrix (R, C), zero beyond its edges.

    Offsets have 64 bits: a view may span more than 2^31 elements.
    """
    offsets_RC = rows_R[:, None].to(tl.int64) * row_stride
    offsets_RC += columns_C[None, :].to(tl.int64) * column_stride
    inside_RC = (rows_R[:, None] < R) & (columns_C[None, :] < C)
    return tl.load(base + offsets_RC, mask=inside_RC, other=0.0)


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
    """Return this program's sample and slot.

    Programs start in order: first a sample's whole tiles after another's, then what was halved, and
    those without a tile. Neighbours read the same tokens.
    """
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


@triton.jit
def weigh(x_ptr, weight_ptr, y_ptr, blocks, n, x_b, BLOCK: tl.constexpr):
    """Multiply the n elements of each sample by its weight, and round to their dtype."""
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + sample * x_b + at, mask=at < n, other=0.0).to(tl.float32)
    y = x * tl.load(weight_ptr + sample).to(tl.float32)
    tl.store(y_ptr + sample * n + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def read_logits(z_ptr, at, V, scale, cap, CAPPED: tl.constexpr):
    """Read logits of a row, scaled and capped; -inf behind its end."""
    z = tl.load(z_ptr + at, mask=at < V, other=0.0).to(tl.float32) * scale
    if CAPPED:
        z = cap - 2.0 * cap / (tl.exp(2.0 * z / cap) + 1.0)  # cap tanh(z / cap)
    return tl.where(at < V, z, -float("inf"))


@triton.jit
def differentiate_cross_entropy(
    z_ptr, label_ptr, incoming_ptr, loss_ptr, V, ignored, smoothing, scale, cap,
    CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the cross-entropy's gradients in the place of a row's logits, and write its loss.

    Lanes find the largest logit and the sum of exponentials in one pass (Milakov and Gimelshein
    2018, "Online normalizer calculation for softmax"); a second pass writes gradients.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    label = tl.load(label_ptr + row)
    is_counted = label != ignored
    is_there = (label >= 0) & (label < V)
    place_L = tl.arange(0, BLOCK)
    largest_L = tl.full((BLOCK,), -3.0e38, dtype=tl.float32)
    sums_L = tl.zeros((BLOCK,), dtype=tl.float32)
    logits_L = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        z_L = read_logits(z_ptr, start + place_L, V, scale, cap, CAPPED)
        larger_L = tl.maximum(largest_L, z_L)
        sums_L = sums_L * tl.exp(largest_L - larger_L) + tl.exp(z_L - larger_L)
        logits_L += tl.where(start + place_L < V, z_L, 0.0)
        largest_L = larger_L
    largest = tl.max(largest_L, axis=0)
    total = tl.sum(sums_L * tl.exp(largest_L - largest), axis=0)
    chosen = tl.where(is_there, label, 0)
    target = (1.0 - smoothing) * read_logits(z_ptr, chosen, V, scale, cap, CAPPED)
    target += smoothing * tl.sum(logits_L, axis=0) / V
    loss = tl.where(is_there, largest + tl.log(total) - target, float("nan"))
    tl.store(loss_ptr + row, tl.where(is_counted, loss, 0.0))
    share = scale
    if WEIGHTED:
        share = scale * tl.load(incoming_ptr + row).to(tl.float32)
    for start in range(0, V, BLOCK):
        at_L = start + place_L
        z_L = read_logits(z_ptr, at_L, V, scale, cap, CAPPED)
        g_L = tl.exp(z_L - largest) / total - smoothing / V
        g_L -= tl.where(at_L == chosen, 1.0 - smoothing, 0.0)
        if CAPPED:
            g_L *= 1.0 - (z_L / cap) * (z_L / cap)
        g_L = tl.where(is_counted, g_L * share, 0.0)
        tl.store(z_ptr + at_L, g_L.to(z_ptr.dtype.element_ty), mask=at_L < V)


@triton.jit
def to_normals(a, b):
    """Turn two words of 32 random bits into two normal numbers (Box and Muller 1958).

    The largest possible one is sqrt(66 log 2), 6.76. A normal number is larger once in 10^11.
    """
    radius = tl.sqrt(-2.0 * tl.log((a.to(tl.float32) + 0.5) * 2.0**-32))
    angle = b.to(tl.float32) * (6.283185307179586 * 2.0**-32)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit(do_not_specialize=["which"])
def add_normal(sum_ptr, words_ptr, which, n, std, factor, GROUP: tl.constexpr):
    """Multiply n numbers by a factor, and add normal noise.

    Four numbers at a time are the cipher Philox4x32-10 of a counter (Salmon et al. 2011, "Parallel
    Random Numbers: As Easy as 1, 2, 3"), as in PyTorch's own generator on a GPU. Its key is the
    first word. The counter is the place in the sum, ``which`` of the step's sums it is, and the
    second word.
    """
    program = tl.program_id(0).to(tl.int64)
    place_G = (program * GROUP + tl.arange(0, GROUP)).to(tl.uint32)
    zero_G = place_G ^ place_G
    seed = tl.load(words_ptr).to(tl.uint64)
    digest = tl.load(words_ptr + 1)
    which_G = (zero_G + which).to(tl.uint32)
    low_G = zero_G + (digest & 0xFFFFFFFF).to(tl.uint32)
    high_G = zero_G + ((digest >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a_G, b_G, c_G, d_G = tl.philox(seed, place_G, low_G, which_G, high_G)
    of_ab = to_normals(a_G, b_G)
    of_cd = to_normals(c_G, d_G)
    at_G = program * (4 * GROUP) + tl.arange(0, GROUP)
    add_to(sum_ptr, at_G, n, of_ab[0], std, factor)
    add_to(sum_ptr, at_G + GROUP, n, of_ab[1], std, factor)
    add_to(sum_ptr, at_G + 2 * GROUP, n, of_cd[0], std, factor)
    add_to(sum_ptr, at_G + 3 * GROUP, n, of_cd[1], std, factor)


@triton.jit
def add_to(sum_ptr, at_G, n, noise_G, std, factor):
    """Multiply n numbers by a factor, and add noise of a standard deviation."""
    sum_G = tl.load(sum_ptr + at_G, mask=at_G < n, other=0.0)
    tl.store(sum_ptr + at_G, sum_G * factor + std * noise_G, mask=at_G < n)


@triton.jit(do_not_specialize=["which"])
def add_digest(of_ptr, table_ptr, words_ptr, which, n, GROUP: tl.constexpr):
    """Add the hash of a group of n numbers of 32 bits to the second word, modulo 2^64.

    The sum of their products with secret numbers is hashed again, with numbers that the cipher
    Philox makes of the group's place and of ``which`` sum it is of.
    """
    program = tl.program_id(0).to(tl.int64)
    in_G = tl.arange(0, GROUP)
    at_G = program * GROUP + in_G
    number_G = tl.load(of_ptr + at_G, mask=at_G < n, other=0).to(tl.int64)
    of_group = tl.sum(number_G * tl.load(table_ptr + 1 + in_G), 0)
    place = program.to(tl.uint32)
    zero = place ^ place
    key = tl.load(table_ptr).to(tl.uint64)
    a, b, c, d = tl.philox(key, place, (zero + which).to(tl.uint32), zero, zero)
    of_low = a.to(tl.int64) + (b.to(tl.int64) << 32)
    of_high = c.to(tl.int64) + (d.to(tl.int64) << 32)
    hashed = (of_group & 0xFFFFFFFF) * of_low + ((of_group >> 32) & 0xFFFFFFFF) * of_high
    tl.atomic_add(words_ptr + 1, hashed)
