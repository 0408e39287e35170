"""What CPU kernels allocate and free within one operator, by formula.

The allocator counts it and the dispatcher does not see it, so it is needed where such an operator
makes the peak. Source: aten/src/ATen/native/cpu (FlashAttentionKernel.cpp, layer_norm_kernel.cpp,
ScatterGatherKernel.cpp) and ProcessGroupGloo.cpp of PyTorch; tests/memory compares with the
allocator's events. Where only a lower bound is known, ``explain_unknown`` says so.

Left out, because it depends on the processor's instructions: what oneDNN allocates for a bfloat16
product, up to a few hundred KiB.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from dpprof.predict.memory.convolution_workspaces import CONVOLUTION_WORKSPACES
from dpprof.predict.memory.events import Workspace
from dpprof.predict.memory.fourier_workspaces import FOURIER_WORKSPACES
from dpprof.predict.memory.operand_copies import OPERAND_COPIES
from dpprof.predict.memory.recurrent_workspaces import RECURRENT_WORKSPACES
from dpprof.predict.memory.wrapped_numbers import with_numbers

aten = torch.ops.aten
_REDUCED = (torch.bfloat16, torch.float16)


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
    **CONVOLUTION_WORKSPACES,
    **FOURIER_WORKSPACES,
    **OPERAND_COPIES,
    **RECURRENT_WORKSPACES,
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

CPU_WORKSPACES: Mapping[Any, Workspace] = with_numbers(_WORKSPACES)
"""Functions from an operator's arguments to bytes, by overload packet."""

_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
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
_UPSAMPLING = ("upsample_", "_upsample_")


def explain_unknown(op: str, dtype: str) -> str | None:
    """Return why an operator may allocate and free more than is counted; None if it does not."""
    if op in _RECURRENT and dtype != "float32":
        return "a lower bound: oneDNN's copies and scratch memory depend on the processor"
    if op.startswith(_LAPACK) and op != "linalg_vector_norm":
        return "not counted: what LAPACK works in, and copies in its layout"
    if op.startswith(_UPSAMPLING):
        return "not counted: copies with the channels last, which few threads or channels need"
    return _LOWER_BOUNDS.get(op)
