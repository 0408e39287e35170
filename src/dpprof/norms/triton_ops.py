"""The Triton kernels as operators of PyTorch, so that whatever watches operators sees them.

Dispatch modes, FLOP counters and fake tensors know an operator by its registration; a bare
kernel launch they do not. FLOPs are those of the tiles on and below the diagonal, half of
both Gram matrices, and of the product.

Shape legend: B samples, T tokens, d width of the input, p width of the output.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dpprof.norms.code_paths import Way
from dpprof.norms.float32_products import name_precision
from dpprof.norms.placement import simulates_kernels

KERNELS = {Way.TILED_GRAM: "gram_squares", Way.TILED_PRODUCT: "product_squares"}
"""By the way to a norm that they are."""

_tiles: dict[tuple[str, int, int, int], dict[str, int]] = {}
"""With which configuration a kernel ran last, by its name and T, d and p."""

_is_faster: dict[tuple[str, int, int, int], bool] = {}
"""Whether a kernel was faster than PyTorch's products, by its name and T, d and p."""


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
    if reason is None and not all(_is_faster.values()):
        reason = "PyTorch's products were faster than the kernel, where there are no tiles"
    return {} if reason is None else {"norm_plan.tiles": reason}


def tell_tiles(way: Way, T: int, d: int, p: int) -> dict[str, int] | None:
    """Tell the configuration that tuning chose for a kernel; None where none has run."""
    return _tiles.get((KERNELS.get(way, way), T, d, p))


def _can_run(x: Tensor) -> bool:
    """Tell whether a tensor is where kernels run."""
    return simulates_kernels() or (x.is_cuda and why_no_kernels() is None)


def is_fused(x: Tensor) -> bool:
    """Tell whether there is a kernel for a tensor: on CUDA, with Triton, not for float64."""
    return _can_run(x) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def is_faster(way: Way, x_BTd: Tensor, g_BTp: Tensor, by_products: Callable[[], object]) -> bool:
    """Tell whether a kernel is the faster way to norms of a shape; both are timed, once.

    Only exact products of float32 are in doubt: they take no tensor cores, and cuBLAS's reuse more
    of what they load. An estimate, which times nothing, takes the kernel to be.
    """
    takes_tensor_cores = x_BTd.dtype != torch.float32 or name_precision(x_BTd.dtype) != "ieee"
    if takes_tensor_cores or isinstance(x_BTd, FakeTensor) or not len(x_BTd):
        return True
    kernel = KERNELS[way]
    key = (kernel, *x_BTd.shape[1:], g_BTp.shape[2])
    if key not in _is_faster:
        from dpprof.norms.tuning import time_launch  # noqa: PLC0415 (it imports triton)

        ways = (lambda: _run(kernel, x_BTd, g_BTp), by_products)
        of_kernel, of_products = (time_launch(run, [0.5])[0] for run in ways)
        _is_faster[key] = of_kernel <= of_products
        if not _is_faster[key]:
            del _tiles[key]
    return _is_faster[key]


@torch.library.custom_op("dpprof::gram_squares", mutates_args=())
def gram_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square norms from Gram matrices that stay in registers, and squares of both; (3, B)."""
    return _run("gram_squares", x_BTd, g_BTp)


@torch.library.custom_op("dpprof::product_squares", mutates_args=())
def product_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square norms from gradients that stay in registers; (B,) float32."""
    return _run("product_squares", x_BTd, g_BTp)


def _run(kernel: str, x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    from dpprof.norms import triton_launch  # noqa: PLC0415 (it imports triton)

    squares: Tensor = getattr(triton_launch, kernel)(x_BTd, g_BTp)
    if len(x_BTd):
        _tiles[kernel, *x_BTd.shape[1:], g_BTp.shape[2]] = triton_launch.tell_tiles(kernel)
    return squares


@torch.library.custom_op("dpprof::scale_gradients", mutates_args=())
def scale_gradients(
    x_BTd: Tensor, g_BTd: Tensor, mean_BT: Tensor | None, rstd_BT: Tensor
) -> Tensor:
    """Sum what a normalisation's scale adds, in one pass over both tensors; (B, d) float32."""
    from dpprof.norms import triton_launch  # noqa: PLC0415 (it imports triton)

    return triton_launch.scale_gradients(x_BTd, g_BTd, mean_BT, rstd_BT)


SCALE = torch.ops.dpprof.scale_gradients
"""The operator that it is."""


@scale_gradients.register_fake
def _sums_by_column(x_BTd: Tensor, *_: Any) -> Tensor:
    return x_BTd.new_empty((x_BTd.shape[0], x_BTd.shape[2]), dtype=torch.float32)


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
