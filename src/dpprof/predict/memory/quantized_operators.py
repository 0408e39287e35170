"""Operators of bitsandbytes, as the operators that they consist of.

A product with a quantised weight dequantises it first, within one operator that a recorder would
see whole. So a recorder runs its parts: copies then have owners, products their FLOPs, and each
part its time. Source: ``gemm_4bit`` and ``int8_scaled_mm`` in bitsandbytes' ``backends``. On CUDA
its own kernel runs in place of the first for few tokens, by rules that depend on the GPU, at most
1,536 in a batch, and makes no copy; that is not known here.

Shape legend: M tokens of all samples, K inputs, N outputs.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace
from dpprof.private.substitutes import substitute


def multiply_4bit(  # noqa: PLR0917 (as the operator)
    x_MK: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Return ``x W^T + bias`` for a weight of 4 bits; (..., N)."""
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = ops.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = scales + absmax_offset
        del scales
    w_NK = ops.dequantize_4bit(packed, absmax, blocksize, quant_type, shape, x_MK.dtype)
    # Within a mode, functional.linear would be one operator, and not the product that it calls.
    if not x_MK.is_contiguous():
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    rows_MK = x_MK.view(-1, x_MK.shape[-1])
    y_MN = rows_MK.mm(w_NK.t()) if bias is None else torch.addmm(bias, rows_MK, w_NK.t())
    return y_MN.view(*x_MK.shape[:-1], -1)


def multiply_8bit(  # noqa: PLR0917 (as the operator)
    x_MK: Tensor,
    w_NK: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``x W^T + bias`` of 8-bit numbers, which its kernel scales in float16; (..., N)."""
    ops = torch.ops.bitsandbytes
    in_int32 = ops.int8_linear_matmul(x_MK, w_NK)
    scaled: Tensor = ops.int8_mm_dequant(in_int32, row_stats, col_stats, torch.float16, bias)
    if dtype in (None, torch.float16):
        return scaled
    copied: Tensor = torch.ops.aten._to_copy(scaled, dtype=dtype)  # noqa: SLF001 (see above)
    return copied


@contextmanager
def products_of_cuda() -> Iterator[None]:
    """Have layers of int8 take the product that they take on CUDA, whatever tensors they get."""
    if "bitsandbytes" not in sys.modules:
        yield
        return
    product: Any = sys.modules["bitsandbytes.autograd._functions"].MatMul8bitLt

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, state: Any) -> Any:
        return product.apply(x, weight, None, bias, state)

    with substitute(sys.modules["bitsandbytes"], "matmul", multiply):
        yield


def optimizer_workspaces() -> dict[Any, Workspace]:
    """Return what bitsandbytes' optimizers allocate within an operator on a CPU, by packet.

    Both moments in float32, the scaled gradient, a square root and its quotient; of a parameter
    that keeps moments in float32 the last three. None on CUDA, where one kernel does it. Source:
    ``backends/cpu/ops.py``.
    """
    if "bitsandbytes" not in sys.modules:
        return {}
    ops = torch.ops.bitsandbytes
    return {
        ops.optimizer_update_8bit_blockwise: lambda _, gradient, *__: (5 * 4 * gradient.numel(),),
        ops.optimizer_update_32bit: lambda _, gradient, *__: (3 * 4 * gradient.numel(),),
    }


PARTS: Mapping[str, Callable[..., Any]] = {
    "gemm_4bit": multiply_4bit,
    "int8_scaled_mm": multiply_8bit,
}
"""The parts of an operator, by its name."""
