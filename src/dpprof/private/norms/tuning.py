"""The tile sizes that Triton chooses from, and how it times them.

Triton times the configurations at the first call with each dtype and sizes, rounded up to powers of
two, and caches the times on disk with its compiled kernels (``TRITON_CACHE_DIR``). The choice
depends on the machine, and decides the order of float32 sums: with the same choice results are
bitwise repeatable, otherwise equal to rounding. Results record the choice (``norm_plan``).

Under Triton's interpreter (``TRITON_INTERPRET=1`` when triton is imported) tiles are small, so that
small inputs have several tiles and edges, and nothing is timed.

Shapes: T tokens, d in, p out; K what a product sums over.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import Config, knobs

INTERPRETED: bool = knobs.runtime.interpret  # by Triton, on tensors of a CPU

_WIDE_K = 64
_PRODUCTS = 1024  # the most products of a thread that are unrolled

_TIMES = 5


def _config(warps: int, stages: int, **sizes: int) -> Config:
    return Config(sizes, num_warps=warps, num_stages=stages)


# Compiled for an H200 these need at most 144 of the 227 KiB of shared memory of a block.
# Three float32 tiles of 128 x 128 are 192 registers for each of 8 warps, one of 128 x 256 is 128.
GRAM: list[Config] = [
    _config(8, 3, TILE_T=128, TILE_K=64),
    _config(8, 4, TILE_T=128, TILE_K=64),
    _config(4, 4, TILE_T=64, TILE_K=64),
    _config(4, 3, TILE_T=64, TILE_K=64),
    _config(4, 3, TILE_T=64, TILE_K=128),
    _config(8, 3, TILE_T=128, TILE_K=32),
    _config(8, 3, TILE_T=64, TILE_K=32),
    _config(4, 3, TILE_T=64, TILE_K=16),
    _config(4, 2, TILE_T=64, TILE_K=16),
]
DESCRIBED: Config = _config(8, 5, TILE_T=128, TILE_K=64)
"""The tile for Gram matrices whose operands are described: on an H100 it takes 0.74 to 0.96 of the
time of the fastest of the others."""

DESCRIBED_TOKENS = 512
"""The fewest tokens for which ``DESCRIBED`` runs: with 256 it took 1.2 times as long as the others,
with 128 it took 1.6 times as long."""

PRODUCT: list[Config] = [
    _config(8, 3, TILE_D=128, TILE_P=256, TILE_K=64),
    _config(8, 3, TILE_D=128, TILE_P=128, TILE_K=64),
    _config(4, 4, TILE_D=64, TILE_P=128, TILE_K=64),
    _config(4, 4, TILE_D=64, TILE_P=64, TILE_K=64),
    _config(8, 3, TILE_D=128, TILE_P=128, TILE_K=32),
    _config(4, 3, TILE_D=64, TILE_P=128, TILE_K=32),
    _config(8, 3, TILE_D=128, TILE_P=64, TILE_K=16),
    _config(4, 3, TILE_D=64, TILE_P=64, TILE_K=32),
]
PROGRAMS = 1024
"""How many programs share a batch's tiles, at least one for each sample: about eight for each of an
H200's 132 multiprocessors. Partial sums take at most 20 (PROGRAMS + B) bytes for any T."""

SCALED = {"TILE_T": 32, "TILE_D": 128}
"""Tokens and columns of a tile without matrix products, which is read at the speed of memory at any
size that fills registers: 16 float32 for each thread."""

LOGITS = {"BLOCK": 2048}  # that a program reads at once, with three numbers for each
WEIGHED = {"BLOCK": 4096}  # elements of a block, read and written once: 16 a thread
GROUP = 1024  # blocks of four random numbers that a program draws: four for each of 256 threads
HASHED = 4096  # words of 32 bits that a program hashes: 16 a thread, with one atomic addition

if INTERPRETED:
    GROUP = HASHED = 16
    WEIGHED = {"BLOCK": 32}
    SCALED = {"TILE_T": 8, "TILE_D": 16}
    GRAM = [_config(1, 1, TILE_T=32, TILE_K=32)]
    DESCRIBED, DESCRIBED_TOKENS = GRAM[0], 64
    PRODUCT = [_config(1, 1, TILE_D=16, TILE_P=32, TILE_K=16)]


def keep_suitable(configs: list[Config], arguments: dict[str, Any], **more: Any) -> list[Config]:
    """Keep the configurations that suit an input's dtype and precision.

    Steps along K have the same bytes for all dtypes: wide in 16 bits, narrow in float32. Each
    exact float32 product is one unrolled instruction of a thread, so those tiles must be small.
    """
    if arguments["x_ptr"].dtype != torch.float32:
        return [config for config in configs if config.kwargs["TILE_K"] >= _WIDE_K]
    narrow = [config for config in configs if config.kwargs["TILE_K"] < _WIDE_K]
    if more["PRECISION"] == "tf32x3":
        return narrow
    suitable = []
    for config in narrow:
        sizes = config.kwargs
        area = sizes["TILE_D"] * sizes["TILE_P"] if "TILE_D" in sizes else sizes["TILE_T"] ** 2
        if area * sizes["TILE_K"] // (32 * config.num_warps) <= _PRODUCTS:
            suitable.append(config)
    return suitable


def time_launch(launch: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Time a launch on the current CUDA stream, in ms, at some quantiles.

    Triton's own benchmark clears the GPU's cache with a buffer of 256 MB, which would change the
    measured peak of memory.
    """
    launch()
    pairs = []
    for _ in range(_TIMES):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        launch()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times_ms = torch.tensor([start.elapsed_time(end) for start, end in pairs])
    return [times_ms.quantile(quantile).item() for quantile in quantiles]


TUNING = {
    "key": ["T_rounded", "d_rounded", "p_rounded", "PRECISION"],
    "prune_configs_by": {"early_config_prune": keep_suitable},
    "do_bench": time_launch,
    "cache_results": True,
}
"""Arguments of ``triton.autotune``. Triton chooses again if one of ``key``, or a dtype, changes."""
