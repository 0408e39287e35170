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
from typing import Any, NamedTuple

import torch
from triton import Config, knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Whether this process interprets Triton programs, on tensors of a CPU."""

_WIDE_K = 64
_PRODUCTS = 1024
_TIMES = 5


def _gram(tile_T: int, tile_K: int, warps: int, stages: int) -> Config:
    return Config({"TILE_T": tile_T, "TILE_K": tile_K}, num_warps=warps, num_stages=stages)


def _product(tile_d: int, tile_p: int, tile_K: int, warps: int, stages: int) -> Config:
    sizes = {"TILE_D": tile_d, "TILE_P": tile_p, "TILE_K": tile_K}
    return Config(sizes, num_warps=warps, num_stages=stages)


# Compiled for an H200 these need at most 144 of the 227 KiB of shared memory of a block.
# Two float32 tiles of 128 x 128, or one of 128 x 256, are 128 registers for each of 8 warps.
GRAM: list[Config] = [
    _gram(128, 64, 8, 3),
    _gram(128, 128, 8, 2),
    _gram(64, 64, 4, 4),
    _gram(64, 128, 4, 3),
    _gram(128, 32, 8, 3),
    _gram(64, 32, 8, 3),
    _gram(64, 32, 4, 3),
    _gram(64, 16, 4, 3),
]
PRODUCT: list[Config] = [
    _product(128, 256, 64, 8, 3),
    _product(128, 128, 64, 8, 3),
    _product(64, 128, 64, 4, 4),
    _product(64, 64, 64, 4, 4),
    _product(128, 128, 32, 8, 3),
    _product(64, 128, 32, 4, 3),
    _product(128, 64, 16, 8, 3),
    _product(64, 64, 32, 4, 3),
]


class Tile(NamedTuple):
    """Tokens and columns of a tile without matrix products."""

    TILE_T: int
    TILE_D: int


SCALED = Tile(32, 128)
"""Reads at the speed of memory at any size that fills registers: 16 float32 for each thread."""

if INTERPRETED:
    SCALED = Tile(8, 16)
    GRAM = [_gram(32, 32, 1, 1)]
    PRODUCT = [_product(16, 32, 16, 1, 1)]


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
    return [config for config in narrow if _products_of_a_thread(config) <= _PRODUCTS]


def _products_of_a_thread(config: Config) -> int:
    sizes = config.kwargs
    area = sizes["TILE_D"] * sizes["TILE_P"] if "TILE_D" in sizes else sizes["TILE_T"] ** 2
    products: int = area * sizes["TILE_K"] // (32 * config.num_warps)
    return products


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
