"""The sizes of matrix products, from the arguments of their operators.

PyTorch's registry has formulas for some of these, which fail on the overloads with an out_dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.flops.cost import ProductShape

aten = torch.ops.aten


def _single(a: Tensor, b: Tensor) -> ProductShape:
    return 1, a.shape[-2], b.shape[-1], a.shape[-1]


def _batched(a: Tensor, b: Tensor) -> ProductShape:
    return a.shape[0], a.shape[-2], b.shape[-1], a.shape[-1]


def _grouped(a: Tensor, b: Tensor) -> ProductShape:
    """Groups divide one of the sizes, unless both operands have an axis of them."""
    return _batched(a, b) if a.dim() == b.dim() == 3 else _single(a, b)  # noqa: PLR2004


PRODUCTS: dict[Any, Callable[..., ProductShape]] = {
    **dict.fromkeys((aten.mm, aten._int_mm), lambda a, b, *_, **__: _single(a, b)),  # noqa: SLF001
    **dict.fromkeys(
        (aten.addmm, aten._addmm_activation),  # noqa: SLF001
        lambda _, a, b, *__, **___: _single(a, b),
    ),
    aten.bmm: lambda a, b, *_, **__: _batched(a, b),
    **dict.fromkeys((aten.baddbmm, aten.addbmm), lambda _, a, b, *__, **___: _batched(a, b)),
    aten._grouped_mm: lambda a, b, *_, **__: _grouped(a, b),  # noqa: SLF001
    aten.mv: lambda a, *_, **__: (1, a.shape[0], 1, a.shape[1]),
    aten.addmv: lambda _, a, *__, **___: (1, a.shape[0], 1, a.shape[1]),
    **dict.fromkeys((aten.dot, aten.vdot), lambda a, *_, **__: (1, 1, 1, a.numel())),
    aten.addr: lambda _, a, b, *__, **___: (1, a.numel(), b.numel(), 1),
}

PRODUCTS_OF_BITSANDBYTES: dict[str, Callable[..., ProductShape]] = {
    "bitsandbytes.int8_linear_matmul": lambda a, b: (1, a.shape[:-1].numel(), *b.shape),
}
"""Products of bitsandbytes, by name because they exist only once it is imported."""
