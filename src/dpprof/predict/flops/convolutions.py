"""Convolutions as the matrix products that they amount to, which give their FLOPs.

An output pixel of a group is a product of its patch of the input with the group's kernels, of
K = (input channels of a group) x (kernel's size) and N = output channels of a group. Each of the
two gradients takes as many multiplications (Chetlur et al. 2014, "cuDNN: Efficient Primitives for
Deep Learning", section 3). Pixels of padding count like others. torch's own formula is not used,
because it counts the gradient of a grouped kernel once for each group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.flops.cost import ProductShape

aten = torch.ops.aten


def _describe(
    x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool, groups: int
) -> tuple[int, int, int]:
    """Return pixels, outputs and inputs of each group's product."""
    images = x if transposed else out
    pixels = images.shape[0] * math.prod(images.shape[2:])
    return pixels, weight.shape[0] // groups, weight[0].numel()


def _forward(
    x: Tensor, weight: Tensor, _bias: Any, *settings: Any, out: Any, **__: Any
) -> Sequence[ProductShape]:
    transposed, groups = settings[3], settings[5]
    pixels, outputs, inputs = _describe(x, weight, out, transposed=transposed, groups=groups)
    return [(groups, pixels, inputs, outputs) if transposed else (groups, pixels, outputs, inputs)]


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias_sizes: Any, *settings: Any, **__: Any
) -> Sequence[ProductShape]:
    transposed, groups, mask = settings[3], settings[5], settings[6]
    pixels, outputs, inputs = _describe(x, weight, gradient, transposed=transposed, groups=groups)
    of_input = (groups, pixels, inputs, outputs)
    of_weight = (groups, outputs, inputs, pixels)
    if transposed:
        of_input = (groups, pixels, outputs, inputs)
    return [product for product, needed in ((of_input, mask[0]), (of_weight, mask[1])) if needed]


CONVOLUTIONS: dict[Any, Callable[..., Sequence[ProductShape]]] = {
    aten.convolution: _forward,
    aten._convolution: _forward,  # noqa: SLF001 (the same arguments, and more)
    aten.convolution_backward: _backward,
}
"""Functions that return the products of a convolution from its arguments and its result ``out``."""
