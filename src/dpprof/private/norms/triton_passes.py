"""Triton kernels that read each number once or twice: scales, weights, losses, noise, digests.

Shapes: T tokens, d width, V vocabulary. Strides are ``x_b``, ``x_t`` and ``x_k``, along samples,
tokens and features, likewise ``g_b``.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(base, rows_R, row_stride, R, columns_C, column_stride, C):
    """Load a tile (R, C), zero beyond its edges, by offsets of 64 bits: views may be that large."""
    offsets_RC = rows_R[:, None].to(tl.int64) * row_stride
    offsets_RC += columns_C[None, :].to(tl.int64) * column_stride
    inside_RC = (rows_R[:, None] < R) & (columns_C[None, :] < C)
    return tl.load(base + offsets_RC, mask=inside_RC, other=0.0)


@triton.jit
def sum_scaled(
    x_ptr, g_ptr, mean_ptr, rstd_ptr, partial_ptr, slots, T, d,
    x_b, x_t, x_k, g_b, g_t, g_k,
    CENTRED: tl.constexpr, SHIFTED: tl.constexpr, TILE_T: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Sum g (x - mean) rstd over tokens; each program writes TILE_D sums to its slot.

    Where ``SHIFTED`` it writes the sums of g behind the d sums of the slot. Means and rstd are
    contiguous, (B, T). Program i of a sample's ``slots`` takes token tiles i, i + slots, ...
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
