"""What oneDNN keeps and frees for a layer and direction of an LSTM on a CPU.

PyTorch computes ``nn.LSTM`` in float32 and bfloat16 by ``mkldnn_rnn_layer``. Its forward pass
returns what oneDNN keeps for backward, several times as much as the output; PyTorch's own result
for fake tensors leaves that out. Beside the results, both passes hold copies of weights and
gradients whose rows have a good length, and scratch memory. Source: src/cpu/rnn/rnn_utils.hpp and
rnn_utils.cpp of oneDNN (``set_workspace_sizes``, ``set_offsets``), ATen/native/mkldnn/RNN.cpp;
tests/memory/test_recurrent_workspaces.py compares with the allocator's events. Sizes do not depend
on the processor, but in bfloat16, and without gradients, copies and scratch memory do
(``cpu_workspaces.explain_unknown``).

Shape legend: T steps, B samples, d width of the input, h width of the state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace
from dpprof.private.norms.placement import is_simulated

aten = torch.ops.aten

_PAGE = 4096
_LINE = 64
_GATES = 4
_FLOAT32 = 4
_MOST_MERGED = 128
"""The least samples with which forward multiplies the input step by step."""

_REST = 4664
"""Addresses and alignment in the scratch memory."""


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


def _forward(x_TBd: Tensor, *args: Any, **__: Any) -> Sequence[int]:
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


def _backward(x_TBd: Tensor, *args: Any, **__: Any) -> Sequence[int]:
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


RECURRENT_WORKSPACES: Mapping[Any, Workspace] = {
    aten.mkldnn_rnn_layer: _forward,
    aten.mkldnn_rnn_layer_backward: _backward,
}
"""Functions from an operator's arguments to bytes, by overload packet."""
