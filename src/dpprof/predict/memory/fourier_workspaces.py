"""What Fourier transforms allocate and free themselves on a CPU.

MKL transforms the last axes of a tensor whose other axes are one, from the longest stride to the
shortest; PyTorch copies a tensor that has no such view. It transforms several axes back to real
numbers in two passes, the last axis last. Source: ATen/native/mkl/SpectralOps.cpp. A PyTorch
without MKL reads every layout as it is.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace

aten = torch.ops.aten


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


def _has_mkl() -> bool:
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def _layout_of(x: Tensor) -> _Layout:
    return _Layout(x.shape, x.stride(), x.element_size())


def _one_pass(x: Tensor, axes: Sequence[int], *_: Any, **__: Any) -> Sequence[int]:
    return (_layout_of(x).copy_bytes(axes),) if _has_mkl() else ()


def _to_real(
    x: Tensor, axes: Sequence[int], _normalization: int, length: int, **_: Any
) -> Sequence[int]:
    if not _has_mkl():
        return ()
    layout = _layout_of(x)
    *first, last = axes
    if not first:
        return (layout.copy_bytes(axes),)
    between = layout.transformed(first)
    out_bytes = between.nbytes // between.shape[last] * length // 2
    in_first = layout.copy_bytes(first) - out_bytes  # before there is a result
    return (between.nbytes + max(in_first, between.copy_bytes([last])),)


FOURIER_WORKSPACES: Mapping[Any, Workspace] = {
    aten._fft_r2c: _one_pass,  # noqa: SLF001
    aten._fft_c2c: _one_pass,  # noqa: SLF001
    aten._fft_c2r: _to_real,  # noqa: SLF001
}
"""Functions from an operator's arguments to bytes, by overload packet."""
