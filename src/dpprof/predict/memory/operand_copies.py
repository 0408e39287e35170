"""What operators copy on a CPU before they read it, because of its dtype or its strides.

Element-wise operators compute in the dtype that their operands are promoted to, and reductions in
the dtype that they are asked for; both copy an operand of another dtype first (``compute_types`` in
aten/src/ATen/TensorIterator.cpp). Some kernels read contiguous tensors alone. Products copy an
operand that BLAS cannot read in place, a batch of them one matrix for each thread at a time
(``addmm_impl_cpu_`` and ``bmm_out_or_baddbmm_`` in aten/src/ATen/native/LinearAlgebra.cpp).
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace

aten = torch.ops.aten

_LEAST_FOR_BLAS = 400
"""Smaller products of a batch are computed without BLAS."""

_ARITHMETIC = ("add", "sub", "mul", "div", "atan2", "copysign", "fmod", "remainder", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "hypot", "logaddexp")


def _promote(operands: Sequence[Any]) -> tuple[list[Tensor], torch.dtype | None]:
    """Return the tensors with axes, and the dtype they are promoted to; None if all have it."""
    tensors = [x for x in operands if isinstance(x, Tensor) and x.dim()]
    dtypes = {x.dtype for x in tensors}
    return tensors, reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None


def _cast(*operands: Any, **_: Any) -> Sequence[int]:
    tensors, dtype = _promote(operands)
    if dtype is None:
        return ()
    return (sum(x.numel() for x in tensors if x.dtype != dtype) * dtype.itemsize,)


def _cast_in_place(x: Tensor, *others: Any, **_: Any) -> Sequence[int]:
    """Return the casts, and the result before it is cast back."""
    dtype = _promote((x, *others))[1]
    back = x.numel() * dtype.itemsize if dtype not in (None, x.dtype) else 0
    return (*_cast(x, *others), back)


def _choose(_condition: Tensor, x: Tensor, y: Tensor) -> Sequence[int]:
    return _cast(x, y)


def _reduce_as(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Sequence[int]:
    return (x.numel() * dtype.itemsize,) if dtype not in (None, x.dtype) else ()


def _sum_as(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Sequence[int]:
    is_whole = not (x.is_floating_point() or x.is_complex())
    return _reduce_as(x, dtype=torch.int64 if dtype is None and is_whole else dtype)


def _of_complex(x: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    """Return the complex result, of which the real part is kept."""
    return (x.nbytes,) if x.is_complex() else ()


def _make_contiguous(*operands: Any, **_: Any) -> Sequence[int]:
    return tuple(x.nbytes for x in operands if isinstance(x, Tensor) and not x.is_contiguous())


def _is_read_by_blas(matrix: Sequence[int], stride: Sequence[int]) -> bool:
    (rows, columns), (of_row, of_column) = matrix, stride
    by_columns = of_row == 1 and of_column >= max(1, rows)
    return by_columns or (of_column == 1 and of_row >= max(1, columns))


def _copied(matrix: Tensor) -> int:
    """Return the bytes of the copy of a matrix, or of one of a batch; 0 where BLAS reads it."""
    shape = matrix.shape[-2:]
    is_read = _is_read_by_blas(shape, matrix.stride()[-2:])
    return 0 if is_read else shape.numel() * matrix.element_size()


def _multiply(x: Tensor, y: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    return (_copied(x) + _copied(y),)


def _multiply_and_add(_: Tensor, x: Tensor, y: Tensor, **__: Any) -> Sequence[int]:
    return _multiply(x, y)


def _multiply_batch(x: Tensor, y: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    batch, rows, inner = x.shape
    conjugated = sum(tensor.nbytes for tensor in (x, y) if tensor.is_conj())
    if rows * inner * y.shape[2] < _LEAST_FOR_BLAS:
        return (conjugated,)
    return (conjugated + min(batch, torch.get_num_threads()) * (_copied(x) + _copied(y)),)


OPERAND_COPIES: Mapping[Any, Workspace] = {
    **{getattr(aten, name): _cast for name in (*_ARITHMETIC, *_COMPARISONS)},
    **{getattr(aten, f"{name}_"): _cast_in_place for name in _ARITHMETIC},
    aten.where: _choose,
    aten.abs: _of_complex,
    aten.angle: _of_complex,
    aten.mean: _reduce_as,
    aten.linalg_vector_norm: _reduce_as,
    **dict.fromkeys((aten.sum, aten.prod, aten.cumsum, aten.cumprod), _sum_as),
    **dict.fromkeys((aten._softmax, aten._softmax_backward_data), _make_contiguous),  # noqa: SLF001
    **dict.fromkeys((aten._log_softmax, aten._log_softmax_backward_data), _make_contiguous),  # noqa: SLF001
    aten.native_layer_norm: _make_contiguous,
    aten.mm: _multiply,
    aten.addmm: _multiply_and_add,
    aten.bmm: _multiply_batch,
}
"""Functions from an operator's arguments to bytes, by overload packet. Most calls copy nothing."""
