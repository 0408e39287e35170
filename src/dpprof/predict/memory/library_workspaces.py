"""What oneDNN and MKL allocate and free for convolutions, LSTMs and Fourier transforms on a CPU.

PyTorch has oneDNN compute convolutions, which copies each tensor into a layout with the channels in
whole blocks of a vector register, and its result back. Channels of groups are not filled up to a
block, fewer input channels than one block stay as they are, and 1 x 1 kernels without stride need
no copies. This was read off PyTorch's allocator (tests/memory/test_convolution_workspaces.py). Left
out: scratch memory, which oneDNN takes for kernels with a stride, and convolutions of few elements
or in float64, which PyTorch computes itself.

PyTorch computes ``nn.LSTM`` in float32 and bfloat16 by ``mkldnn_rnn_layer``, for a layer and
direction. Its forward pass returns what oneDNN keeps for backward, several times as much as the
output; PyTorch's own result for fake tensors leaves that out. Beside the results, both passes hold
copies of weights and gradients whose rows have a good length, and scratch memory. Source:
src/cpu/rnn/rnn_utils.hpp and rnn_utils.cpp of oneDNN (``set_workspace_sizes``, ``set_offsets``),
ATen/native/mkldnn/RNN.cpp. Sizes do not depend on the processor, but in bfloat16, and without
gradients, copies and scratch memory do (``cpu_workspaces.explain_unknown``).

MKL transforms the last axes of a tensor whose other axes are one, from the longest stride to the
shortest; PyTorch copies a tensor that has no such view. It transforms several axes back to real
numbers in two passes, the last axis last. Source: ATen/native/mkl/SpectralOps.cpp. A PyTorch
without MKL reads every layout as it is.

Shape legend: T steps, B samples, d width of the input, h width of the state.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace
from dpprof.private.norms.placement import is_simulated

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


def _needs_none(x: Tensor, weight: Tensor, settings: Sequence[Any]) -> bool:
    stride, padding, _, is_transposed, *_ = settings
    is_product = math.prod(weight.shape[2:]) == 1 and {*stride} == {1} and {*padding} == {0}
    return is_transposed or is_product or x.dtype is torch.float64 or not x.numel()


def _convolve(x: Tensor, weight: Tensor, _bias: Any, *settings: Any) -> Sequence[int]:
    """Return what there is beside the result, at most."""
    if _needs_none(x, weight, settings):
        return ()
    stride, padding, dilation, *_, groups = settings
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    pixels = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    out = x.shape[0] * weight.shape[0] * pixels
    of_x, of_weight, of_out = _copies(x, weight, out, groups)
    return (max(of_x + of_weight + of_out - out * x.element_size(), of_out),)


def _convolve_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias_sizes: Any, *settings: Any
) -> Sequence[int]:
    """Return what there is beside the results, at most; the input's gradient is computed first."""
    if _needs_none(x, weight, settings):
        return ()
    *_, groups, mask = settings
    x_bytes, weight_bytes = x.nbytes * mask[0], weight.nbytes * mask[1]
    of_x, of_weight, of_out = _copies(x, weight, gradient.numel(), groups)
    sizes = [0]
    if mask[0]:
        sizes += [of_out + of_weight + of_x - x_bytes - weight_bytes, of_x - weight_bytes]
    if mask[1]:
        sizes += [of_x + of_out + of_weight - weight_bytes, of_weight]
    return (max(sizes),)


_PAGE = 4096
_LINE = 64
_GATES = 4
_FLOAT32 = 4
_MOST_MERGED = 128
"""The least samples with which forward multiplies the input step by step."""

_REST = 4664  # addresses and alignment in the scratch memory


def _row(width: int, size: int) -> int:
    """Return the length that oneDNN gives a row: whole cache lines, and no multiple of 256."""
    line = _LINE // size
    length = -(-width // line) * line
    return length if length % 256 else length + line


def _pages(*sizes: int) -> int:
    """Return the size of arrays that each begin at a page."""
    return sum(-(-size // _PAGE) * _PAGE for size in sizes)


def _kept_bytes(x_TBd: Tensor, width: int) -> int:
    """Return what forward keeps for backward: gates, outputs, states, and gradients of states."""
    steps, batch, inputs = x_TBd.shape
    size, rows = x_TBd.element_size(), steps * batch
    states = 2 * (steps + 1) * batch
    return _pages(
        rows * _row(_GATES * width, size) * size,
        rows * _row(width, size) * size,
        *_states(x_TBd, width),
        *[states * _row(max(inputs, width), _FLOAT32) * _FLOAT32] * 2,
        states * width * _FLOAT32,
    )


def _states(x_TBd: Tensor, width: int) -> tuple[int, int]:
    """Return the outputs, and the states of cells, of all steps and of what precedes them."""
    steps, batch, inputs = x_TBd.shape
    rows, size = 2 * (steps + 1) * batch, x_TBd.element_size()
    return rows * _row(max(inputs, width), size) * size, rows * width * size


def run_layer(x_TBd: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return what the forward pass does, for fake tensors; on a GPU cuDNN would run."""
    results = aten.mkldnn_rnn_layer.default(x_TBd, *args, **kwargs)
    if is_simulated() or not torch.is_grad_enabled():
        return tuple(results)
    kept = _kept_bytes(x_TBd, results[0].shape[-1])
    return *results[:3], x_TBd.new_empty((kept,), dtype=torch.uint8)


def run_layer_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return what the backward pass does, for fake tensors: two gradients of biases, not one."""
    results = aten.mkldnn_rnn_layer_backward.default(*args, **kwargs)
    return *results[:4], torch.empty_like(results[3]), *results[5:]


def _scratch_bytes(x_TBd: Tensor, width: int, *, merged: bool) -> int:
    steps, batch, _ = x_TBd.shape
    of_states = batch * _row(width, _FLOAT32) * _FLOAT32
    of_gates = batch * _row(_GATES * width, _FLOAT32) * _FLOAT32
    return _pages(of_gates * (steps if merged else 1), of_states, of_states) + _REST


def _copied_bytes(rows: int, width: int, *, of_one: bool) -> int:
    """Return the copy of a matrix with the inputs first; a single row may need none."""
    gates = _GATES * width
    copied = rows * _row(gates, _FLOAT32) if rows > 1 else gates * of_one
    return copied * _FLOAT32


def _lstm(x_TBd: Tensor, *args: Any, **__: Any) -> Sequence[int]:
    """Return the sum of the biases, copies of the matrices, and scratch memory."""
    batch, inputs = x_TBd.shape[1:]
    width, size = args[4].shape[-1], x_TBd.element_size()
    bias = _GATES * width * size
    if size != _FLOAT32:
        return (bias * (1 + inputs + width),)
    keeps = torch.is_grad_enabled()
    scratch = _scratch_bytes(x_TBd, width, merged=keeps and batch < _MOST_MERGED)
    if not keeps:  # at least
        scratch += _pages(*_states(x_TBd, width)) - _pages(batch * _row(width, size) * size)
    copies = sum(_copied_bytes(rows, width, of_one=False) for rows in (inputs, width))
    return (bias + copies + scratch,)


def _lstm_backward(x_TBd: Tensor, *args: Any, **__: Any) -> Sequence[int]:
    """Return gradients that are missing or copied, copies of matrices, and scratch memory."""
    hx, cx, output = args[4], args[5], args[6]
    inputs, width = x_TBd.shape[2], hx.shape[-1]
    nbytes = 0
    for gradient, like in zip(args[9:12], (output, hx, cx), strict=True):
        if gradient is None or not gradient.is_contiguous():
            nbytes += like.nbytes
    for rows in (inputs, width):
        nbytes += _copied_bytes(rows, width, of_one=True)
    if x_TBd.element_size() != _FLOAT32:
        return (nbytes,)
    for rows in (inputs, width):
        if _row(rows, _FLOAT32) != rows:
            nbytes += _GATES * width * _row(rows, _FLOAT32) * _FLOAT32
    # The sum of the biases, and its gradient's copy; the second gradient of biases comes later.
    bias = _GATES * width * _FLOAT32
    return (nbytes + _scratch_bytes(x_TBd, width, merged=True) + bias,)


class _Layout(NamedTuple):
    """A tensor as a transform reads it."""

    shape: Sequence[int]
    stride: Sequence[int]
    element_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    def order(self, axes: Sequence[int]) -> list[int]:
        """Return the axes in the order in which MKL gets them."""
        last = [axis % len(self.shape) for axis in axes]
        others = [axis for axis in range(len(self.shape)) if axis not in last]
        return [*sorted(others, key=lambda axis: -self.stride[axis]), *last]

    def copy_bytes(self, axes: Sequence[int]) -> int:
        """Return the bytes of the copy for a transform of axes; 0 where there is a view."""
        others = self.order(axes)[: len(self.shape) - len(axes)]
        long = [axis for axis in others if self.shape[axis] != 1]
        is_one = all(
            self.stride[left] == self.stride[right] * self.shape[right]
            for left, right in pairwise(long)
        )
        return 0 if is_one else self.nbytes

    def transformed(self, axes: Sequence[int]) -> "_Layout":
        """Return the result of a complex transform of axes."""
        stride, step = [0] * len(self.shape), 1
        for axis in reversed(self.order(axes)):
            stride[axis] = step
            step *= self.shape[axis]
        return self._replace(stride=stride)


def _fourier(
    x: Tensor, axes: Sequence[int], _normalization: int, length: int, **_: Any
) -> Sequence[int]:
    """Return copies for a transform; ``length`` is a number where it goes back to real numbers."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return ()
    layout = _Layout(x.shape, x.stride(), x.element_size())
    *first, last = axes
    if not first or isinstance(length, bool):
        return (layout.copy_bytes(axes),)
    between = layout.transformed(first)
    out_bytes = between.nbytes // between.shape[last] * length // 2
    in_first = layout.copy_bytes(first) - out_bytes  # before there is a result
    return (between.nbytes + max(in_first, between.copy_bytes([last])),)


LIBRARY_WORKSPACES: Mapping[Any, Workspace] = {
    aten.convolution: _convolve,
    aten.convolution_backward: _convolve_backward,
    aten.mkldnn_rnn_layer: _lstm,
    aten.mkldnn_rnn_layer_backward: _lstm_backward,
    **dict.fromkeys((aten._fft_r2c, aten._fft_c2c, aten._fft_c2r), _fourier),  # noqa: SLF001
}
"""Functions from an operator's arguments to bytes, by overload packet."""
