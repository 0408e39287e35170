"""What convolutions allocate and free themselves on a CPU, nearly.

PyTorch has oneDNN compute them, which copies each tensor into a layout with the channels in whole
blocks of a vector register, and its result back. Channels of groups are not filled up to a block,
fewer input channels than one block stay as they are, and 1 x 1 kernels without stride need no
copies. This was read off PyTorch's allocator (tests/memory/test_convolution_workspaces.py). Left
out: scratch memory, which oneDNN takes for kernels with a stride, and convolutions of few elements
or in float64, which PyTorch computes itself.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace

aten = torch.ops.aten


def _pad(channels: int) -> int:
    """Return the channels that whole blocks have, of 16 numbers in AVX-512, else of 8."""
    block = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    return -(-channels // block) * block


def _copies(x: Tensor, weight: Tensor, out_numel: int, groups: int) -> tuple[int, int, int]:
    """Return the bytes of the copies of input, weight and output."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    in_share, out_share = _pad(inputs) / inputs, _pad(outputs) / outputs
    if groups > 1:
        in_share = out_share = 1.0
    size = x.element_size()
    of_x, of_weight = x.numel() * in_share, weight.numel() * in_share * out_share
    if groups == 1 and inputs < _pad(1):
        of_x, of_weight = 0, weight.numel() * out_share
    return int(of_x * size), int(of_weight * size), int(out_numel * out_share * size)


def _needs_none(x: Tensor, weight: Tensor, stride: Any, padding: Any, *, transposed: bool) -> bool:
    is_product = math.prod(weight.shape[2:]) == 1 and {*stride} == {1} and {*padding} == {0}
    return transposed or is_product or x.dtype is torch.float64 or not x.numel()


def _forward(  # noqa: PLR0917 (as the operator itself)
    x: Tensor,
    weight: Tensor,
    _bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _output_padding: Any,
    groups: int,
) -> Sequence[int]:
    """Return what there is beside the result, at most."""
    if _needs_none(x, weight, stride, padding, transposed=transposed):
        return ()
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    pixels = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    out = x.shape[0] * weight.shape[0] * pixels
    of_x, of_weight, of_out = _copies(x, weight, out, groups)
    return (max(of_x + of_weight + of_out - out * x.element_size(), of_out),)


def _backward(  # noqa: PLR0917 (as the operator itself)
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias_sizes: Any,
    stride: Any,
    padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> Sequence[int]:
    """Return what there is beside the results, at most; the input's gradient is computed first."""
    if _needs_none(x, weight, stride, padding, transposed=transposed):
        return ()
    size = x.element_size()
    x_bytes, weight_bytes = (
        tensor.numel() * size * needed for tensor, needed in zip((x, weight), mask[:2], strict=True)
    )
    of_x, of_weight, of_out = _copies(x, weight, gradient.numel(), groups)
    sizes = [0]
    if mask[0]:
        sizes += [of_out + of_weight + of_x - x_bytes - weight_bytes, of_x - weight_bytes]
    if mask[1]:
        sizes += [of_x + of_out + of_weight - weight_bytes, of_weight]
    return (max(sizes),)


CONVOLUTION_WORKSPACES: Mapping[Any, Workspace] = {
    aten.convolution: _forward,
    aten.convolution_backward: _backward,
}
"""Functions from an operator's arguments to bytes, by overload packet."""
