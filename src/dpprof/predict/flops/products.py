"""The sizes of matrix products, from the arguments of their operators, and of convolutions as such.

PyTorch's registry has formulas for some products, which fail on the overloads with an out_dtype. An
output pixel of a group of a convolution is a product of its patch of the input with the group's
kernels, of K = (input channels of a group) x (kernel's size) and N = output channels of a group.
Each of the two gradients takes as many multiplications (Chetlur et al. 2014, "cuDNN: Efficient
Primitives for Deep Learning", section 3). Pixels of padding count like others. torch's own formula
counts the gradient of a grouped kernel once for each group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.flops.cost import ProductShape

aten = torch.ops.aten


def _multiply(a: Tensor, b: Tensor, *_: Any, **__: Any) -> ProductShape:
    """Return the sizes of one product, or of a batch; groups divide one of the sizes."""
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1  # noqa: PLR2004 (an axis of the batch)
    return batch, a.shape[-2], b.shape[-1], a.shape[-1]


PRODUCTS: dict[Any, Callable[..., ProductShape]] = {
    **dict.fromkeys((aten.mm, aten._int_mm, aten.bmm, aten._grouped_mm), _multiply),  # noqa: SLF001
    **dict.fromkeys(
        (aten.addmm, aten._addmm_activation, aten.baddbmm, aten.addbmm),  # noqa: SLF001
        lambda _, a, b, *__, **___: _multiply(a, b),
    ),
    aten.mv: lambda a, *_, **__: (1, a.shape[0], 1, a.shape[1]),
    aten.addmv: lambda _, a, *__, **___: (1, a.shape[0], 1, a.shape[1]),
    **dict.fromkeys((aten.dot, aten.vdot), lambda a, *_, **__: (1, 1, 1, a.numel())),
    aten.addr: lambda _, a, b, *__, **___: (1, a.numel(), b.numel(), 1),
}

PRODUCTS_OF_BITSANDBYTES: dict[str, Callable[..., ProductShape]] = {
    "bitsandbytes.int8_linear_matmul": lambda a, b: (1, a.shape[:-1].numel(), *b.shape),
}
"""Products of bitsandbytes, by name because they exist only once it is imported."""


def _convolve(
    x: Tensor, weight: Tensor, _bias: Any, *settings: Any, out: Any, **__: Any
) -> Sequence[ProductShape]:
    is_transposed, groups = settings[3], settings[5]
    images = x if is_transposed else out
    pixels = images.shape[0] * math.prod(images.shape[2:])
    sides = weight.shape[0] // groups, weight[0].numel()
    return [(groups, pixels, *(sides[::-1] if is_transposed else sides))]


def _differentiate(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias_sizes: Any, *settings: Any, **__: Any
) -> Sequence[ProductShape]:
    mask = settings[6]
    [(groups, pixels, n, k)] = _convolve(x, weight, None, *settings, out=gradient)
    outputs, inputs = (k, n) if settings[3] else (n, k)
    products = (groups, pixels, k, n), (groups, outputs, inputs, pixels)
    return [product for product, asked in zip(products, mask, strict=False) if asked]


CONVOLUTIONS: dict[Any, Callable[..., Sequence[ProductShape]]] = {
    aten.convolution: _convolve,
    aten._convolution: _convolve,  # noqa: SLF001 (the same arguments, and more)
    aten.convolution_backward: _differentiate,
}
"""Functions that return the products of a convolution from its arguments and its result ``out``."""
