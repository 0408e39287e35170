"""The Triton kernels as operators of PyTorch, so that whatever watches operators sees them.

Dispatch modes, FLOP counters and fake tensors know an operator by its registration; a bare
kernel launch they do not. FLOPs are those of the tiles on and below the diagonal, half of
both Gram matrices, and of the product.

Shape legend: B samples, T tokens, d width of the input, p width of the output.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_cuda(x: Tensor) -> bool:
    """Tell whether a tensor is where kernels run."""
    return x.is_cuda and _has_triton()


def is_fused(x: Tensor) -> bool:
    """Tell whether there is a kernel for a tensor: on CUDA, with Triton, not for float64."""
    return is_cuda(x) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("dpprof::gram_squares", mutates_args=())
def gram_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square norms from Gram matrices that stay in registers; (B,) float32."""
    from dpprof.norms import kernels  # noqa: PLC0415 (it imports triton)

    return kernels.gram_squares(x_BTd, g_BTp)


@torch.library.custom_op("dpprof::product_squares", mutates_args=())
def product_squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """Square norms from gradients that stay in registers; (B,) float32."""
    from dpprof.norms import kernels  # noqa: PLC0415 (it imports triton)

    return kernels.product_squares(x_BTd, g_BTp)


@gram_squares.register_fake
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
