"""The Triton kernels as operators of PyTorch, so that whatever watches operators sees them.

Dispatch modes, FLOP counters and fake tensors know an operator by its registration; a bare
kernel launch they do not. FLOPs are those of the tiles on and below the diagonal, half of
both Gram matrices, and of the product.

Shape legend: B samples, T tokens, d width of the input, p width of the output.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

KERNELS = {"tiled gram": "gram_squares", "tiled product": "product_squares"}
"""By the way to a norm that they are."""

_tiles: dict[tuple[str, int, int, int], dict[str, int]] = {}
"""With which configuration a kernel ran last, by its name and T, d and p."""


@functools.cache
def why_no_kernels() -> str | None:
    """Say why kernels cannot run on this machine's GPU; None where they can.

    Triton compiles a part of its driver when that is first used, which takes a C compiler and
    Python's headers: without either, the first kernel would end the training. It is tried once a
    process, and only one that has a CUDA tensor asks.
    """
    try:
        importlib.import_module("triton.runtime").driver.active.utils  # noqa: B018 (it compiles)
    except ModuleNotFoundError:
        return "Triton is not installed"
    except Exception as error:  # noqa: BLE001 (of compilers, linkers, loaders and drivers)
        told = next(iter(str(error).splitlines()), "")
        return f"Triton's driver cannot be used: {type(error).__name__}: {told}"
    return None


def tell_reasons() -> dict[str, str]:
    """Say why norms on CUDA took PyTorch's operators, if they did so for want of kernels."""
    asked = why_no_kernels.cache_info().currsize
    reason = why_no_kernels() if asked else None
    return {} if reason is None else {"norm_plan.tiles": reason}


def tell_tiles(way: str, T: int, d: int, p: int) -> dict[str, int] | None:
    """Tell the configuration that tuning chose for a kernel; None where none has run."""
    return _tiles.get((KERNELS.get(way, way), T, d, p))


def is_cuda(x: Tensor) -> bool:
    """Tell whether a tensor is where kernels run."""
    return x.is_cuda and why_no_kernels() is None


def is_fused(x: Tensor) -> bool:
    """Tell whether there is a kernel for a tensor: on CUDA, with Triton, not for float64."""
    return is_cuda(x) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("dpprof::gram_squares", mutates_args=())
def gram_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square norms from Gram matrices that stay in registers, and squares of both; (3, B)."""
    return _run("gram_squares", x_BTd, g_BTp)


@torch.library.custom_op("dpprof::product_squares", mutates_args=())
def product_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square norms from gradients that stay in registers; (B,) float32."""
    return _run("product_squares", x_BTd, g_BTp)


def _run(kernel: str, x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    from dpprof.norms import kernels  # noqa: PLC0415 (it imports triton)

    squares: Tensor = getattr(kernels, kernel)(x_BTd, g_BTp)
    if len(x_BTd):
        _tiles[kernel, *x_BTd.shape[1:], g_BTp.shape[2]] = kernels.tell_tiles(kernel)
    return squares


@gram_squares.register_fake
def _sums_of(x_BTd: Tensor, _g_BTp: Tensor) -> Tensor:
    return x_BTd.new_empty((3, len(x_BTd)), dtype=torch.float32)


@product_squares.register_fake
def _norms_of(x_BTd: Tensor, _g_BTp: Tensor) -> Tensor:
    return x_BTd.new_empty(len(x_BTd), dtype=torch.float32)


@register_flop_formula(torch.ops.dpprof.gram_squares)
def _gram_flops(x_BTd: Any, g_BTp: Any, **_: Any) -> int:
    B, T, d = x_BTd
    return int(B * T * (T + 1) * (d + g_BTp[2]))


@register_flop_formula(torch.ops.dpprof.product_squares)
def _product_flops(x_BTd: Any, g_BTp: Any, **_: Any) -> int:
    B, T, d = x_BTd
    return int(2 * B * T * d * g_BTp[2])
