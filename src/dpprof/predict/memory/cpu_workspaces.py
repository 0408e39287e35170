"""What CPU kernels allocate and free within one operator, by formula.

The allocator counts it and the dispatcher does not see it, so it is needed where such an operator
makes the peak. Source: aten/src/ATen/native/cpu (FlashAttentionKernel.cpp, layer_norm_kernel.cpp,
ScatterGatherKernel.cpp) and ProcessGroupGloo.cpp of PyTorch; tests/memory compares with the
allocator's events. Where only a lower bound is known, ``explain_unknown`` says so.

Element-wise operators compute in the dtype that their operands are promoted to, and reductions in
the dtype that they are asked for; both copy an operand of another dtype first (``compute_types`` in
aten/src/ATen/TensorIterator.cpp). Some kernels read contiguous tensors alone. Products copy an
operand that BLAS cannot read in place, a batch of them one matrix for each thread at a time
(``addmm_impl_cpu_`` and ``bmm_out_or_baddbmm_`` in aten/src/ATen/native/LinearAlgebra.cpp). Of a
Python number, as in ``x / 3.0``, they make a tensor (``wrapped_scalar_tensor`` in
ATen/ScalarOps.h), and a copy in the dtype in which they compute.

Left out, because it depends on the processor's instructions: what oneDNN allocates for a bfloat16
product, up to a few hundred KiB.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, distributed

from dpprof.predict.memory.events import Workspace
from dpprof.predict.memory.library_workspaces import LIBRARY_WORKSPACES

aten = torch.ops.aten
_REDUCED = (torch.bfloat16, torch.float16)
_LEAST_FOR_BLAS = 400
"""Smaller products of a batch are computed without BLAS."""

_ARITHMETIC = ("add", "sub", "mul", "div", "atan2", "copysign", "fmod", "remainder", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "hypot", "logaddexp")


def _promote(operands: Sequence[Any]) -> tuple[list[Tensor], torch.dtype]:
    """Return the tensors with axes, and the dtype that they are promoted to."""
    tensors = [x for x in operands if isinstance(x, Tensor) and x.dim()]
    return tensors, reduce(torch.promote_types, {x.dtype for x in tensors}, torch.bool)


def _cast(*operands: Any, **_: Any) -> Sequence[int]:
    tensors, dtype = _promote(operands)
    return (sum(x.numel() for x in tensors if x.dtype != dtype) * dtype.itemsize,)


def _cast_in_place(x: Tensor, *others: Any, **_: Any) -> Sequence[int]:
    """Return the casts, and the result before it is cast back."""
    dtype = _promote((x, *others))[1]
    back = x.numel() * dtype.itemsize if x.dim() and x.dtype != dtype else 0
    return (*_cast(x, *others), back)


def _reduce_as(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Sequence[int]:
    return (x.numel() * dtype.itemsize,) if dtype not in (None, x.dtype) else ()


def _sum_as(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Sequence[int]:
    is_whole = not (x.is_floating_point() or x.is_complex())
    return _reduce_as(x, dtype=torch.int64 if dtype is None and is_whole else dtype)


def _make_contiguous(*operands: Any, **_: Any) -> Sequence[int]:
    return tuple(x.nbytes for x in operands if isinstance(x, Tensor) and not x.is_contiguous())


def _copied(matrix: Tensor) -> int:
    """Return the bytes of the copy of a matrix, or of one of a batch; 0 where BLAS reads it."""
    (rows, columns), (of_row, of_column) = matrix.shape[-2:], matrix.stride()[-2:]
    by_columns = of_row == 1 and of_column >= max(1, rows)
    is_read = by_columns or (of_column == 1 and of_row >= max(1, columns))
    return 0 if is_read else rows * columns * matrix.element_size()


def _multiply(x: Tensor, y: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    return (_copied(x) + _copied(y),)


def _multiply_batch(x: Tensor, y: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    batch, rows, inner = x.shape
    conjugated = sum(tensor.nbytes for tensor in (x, y) if tensor.is_conj())
    if rows * inner * y.shape[2] < _LEAST_FOR_BLAS:
        return (conjugated,)
    return (conjugated + min(batch, torch.get_num_threads()) * (_copied(x) + _copied(y)),)


OPERAND_COPIES: Mapping[Any, Workspace] = {
    **{getattr(aten, name): _cast for name in (*_ARITHMETIC, *_COMPARISONS)},
    **{getattr(aten, f"{name}_"): _cast_in_place for name in _ARITHMETIC},
    aten.where: lambda _, x, y: _cast(x, y),
    # Of a complex result the real part is kept.
    **dict.fromkeys((aten.abs, aten.angle), lambda x, *_: (x.nbytes,) if x.is_complex() else ()),
    **dict.fromkeys((aten.mean, aten.linalg_vector_norm), _reduce_as),
    **dict.fromkeys((aten.sum, aten.prod, aten.cumsum, aten.cumprod), _sum_as),
    **dict.fromkeys((aten._softmax, aten._softmax_backward_data), _make_contiguous),  # noqa: SLF001
    **dict.fromkeys((aten._log_softmax, aten._log_softmax_backward_data), _make_contiguous),  # noqa: SLF001
    aten.native_layer_norm: _make_contiguous,
    aten.mm: _multiply,
    aten.addmm: lambda _, x, y, **__: _multiply(x, y),
    aten.bmm: _multiply_batch,
}
"""What operators copy because of dtypes and strides. Most calls copy nothing."""


def _split(queries: int, keys: int) -> tuple[int, int]:
    """Return the block of queries and keys of the CPU's flash attention."""
    large, middle = 768, 192
    size = 256 if queries >= large else 64 if queries >= middle else 32
    return min(queries, size), min(keys, 512)


def _flash(q: Tensor, k: Tensor, _v: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    """Return scores, their maxima and sums, and the output of one block, for each thread."""
    queries, keys = _split(q.shape[2], k.shape[2])
    size = 8 if q.dtype is torch.float64 else 4
    nbytes = (queries * keys + 2 * queries + queries * q.shape[3]) * size
    if q.dtype in _REDUCED:
        nbytes += queries * keys * 2
    return (torch.get_num_threads() * nbytes,)


def _flash_backward(gradient: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    """Return scores and their gradient for one block, for each thread; sums of rows once.

    A gradient is copied whose heads do not lie side by side.
    """
    queries, keys = _split(q.shape[2], k.shape[2])
    size = 8 if q.dtype is torch.float64 else 4
    nbytes = 2 * queries * keys * size
    if q.dtype in _REDUCED:
        nbytes += 2 * queries * keys * 2
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return copied, torch.get_num_threads() * nbytes, queries * size


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: Any, *rest: Any, **options: Any
) -> Sequence[int]:
    """Return contiguous copies, and gradients of weight and bias for each thread, if needed."""
    copied = sum(tensor.nbytes for tensor in (gradient, x) if not tensor.is_contiguous())
    if not any((rest[-1] if rest else options["output_mask"])[1:]):
        return (copied,)
    width: int = math.prod(shape)
    return copied, 2 * torch.get_num_threads() * width * gradient.element_size()


def _batch_norm_backward(gradient: Tensor, x: Tensor, *rest: Any, **options: Any) -> Sequence[int]:
    """Return a second gradient of the input, where both tensors are laid out in the same way."""
    needs_input = (rest[-1] if rest else options["output_mask"])[0]
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.dim(), [])
    is_alike = any(
        gradient.is_contiguous(memory_format=layout) and x.is_contiguous(memory_format=layout)
        for layout in formats
    )
    return (x.nbytes,) if needs_input and is_alike else ()


def _safe_softmax(x: Tensor, dim: int, **_: Any) -> Sequence[int]:
    """Return which elements are minus infinity, and in which rows all are; a byte for each.

    A contiguous copy is freed before.
    """
    marks = x.numel() + x.numel() // max(1, x.shape[dim])
    return (max(marks, 0 if x.is_contiguous() else x.nbytes),)


def _all_gather(_out: Any, inputs: Any, *_: Any, **__: Any) -> Sequence[int]:
    """Return the flat buffer into which gloo gathers, before it copies the parts out."""
    own = inputs if isinstance(inputs, Tensor) else inputs[0]
    return (distributed.get_world_size() * own.nbytes,)


_WORKSPACES: Mapping[Any, Workspace] = {
    **LIBRARY_WORKSPACES,
    **OPERAND_COPIES,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,  # noqa: SLF001
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,  # noqa: SLF001
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten._safe_softmax: _safe_softmax,  # noqa: SLF001
    # The float32 sums of a target in 16 bits.
    aten.scatter_add_: lambda x, *_, **__: (4 * x.numel(),) if x.dtype in _REDUCED else (),
    torch.ops.c10d._allgather_base_: _all_gather,
    torch.ops.c10d.allgather_: _all_gather,
    # The copy of the input that gloo reduces on all ranks, before it takes a part of it.
    torch.ops.c10d._reduce_scatter_base_: lambda _, x, *__, **___: (x.nbytes,),
}

_WRAPPING = (
    *("add", "sub", "mul", "div", "rsub", "floor_divide", "fmod", "remainder"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor"),
)
WRAPPING = frozenset(
    getattr(aten, name + end)
    for name in _WRAPPING
    for end in ("", "_")
    if hasattr(aten, name + end)
)
"""The overload packets of operators that make a tensor of a Python number."""

_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}


def _with_number(others: Workspace, x: Any, *args: Any, **kwargs: Any) -> Sequence[int]:
    """Return the bytes of a number as a tensor, and of its copy in the result's dtype, too."""
    taken = others(x, *args, **kwargs)
    wrapped = _DTYPES.get(type(args[0])) if args else None
    if wrapped is None or not isinstance(x, Tensor):
        return taken
    computed = torch.result_type(x, args[0])
    return wrapped.itemsize, 0 if computed is wrapped else computed.itemsize, *taken


CPU_WORKSPACES: Mapping[Any, Workspace] = {
    **_WORKSPACES,
    **{p: partial(_with_number, _WORKSPACES.get(p, lambda *_, **__: ())) for p in WRAPPING},
}
"""Functions from an operator's arguments to bytes, by overload packet."""

_LAPACK = ("linalg_", "_linalg_", "cholesky_", "geqrf", "ormqr", "triangular_solve", "lu_")
_LOWER_BOUNDS = {
    **dict.fromkeys(
        ("convolution", "convolution_backward"),
        "nearly known: oneDNN chooses a kernel, and with it copies and scratch memory, by the "
        "processor, where it runs",
    ),
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_backward"),
        "not counted: the sorted ids of all bags, some 8-byte numbers for each id",
    ),
    **dict.fromkeys(
        (
            *("_trilinear", "affine_grid_generator", "binary_cross_entropy_with_logits"),
            *("logsumexp", "multilabel_margin_loss_backward", "multilabel_margin_loss_forward"),
            *("soft_margin_loss_backward", "im2col", "col2im"),
        ),
        "not counted: it computes in several steps, each with a result of its own",
    ),
}


def explain_unknown(op: str, dtype: str) -> str | None:
    """Return why an operator may allocate and free more than is counted; None if it does not."""
    if op.startswith("mkldnn_rnn_layer") and dtype != "float32":
        return "a lower bound: oneDNN's copies and scratch memory depend on the processor"
    if op.startswith(_LAPACK) and op != "linalg_vector_norm":
        return "not counted: what LAPACK works in, and copies in its layout"
    if op.startswith(("upsample_", "_upsample_")):
        return "not counted: copies with the channels last, which few threads or channels need"
    return _LOWER_BOUNDS.get(op)
