"""What CUDA kernels allocate and free themselves, by formula.

A reduction over many elements into few results is shared among thread blocks, which leave
partial results in a buffer, with a counter for each group of blocks. Source:
aten/src/ATen/native/cuda/Reduce.cuh (``setReduceConfig``, ``global_memory_size``), and
layer_norm_kernel.cu for normalisation.

Group norm copies tensors that are not contiguous (group_norm.cpp). cuDNN's convolutions copy those
whose layout is not the one they compute in (ConvUtils.h, ``cudnn_conv_suggest_memory_format``).

Left out: scratch memory of sorting and scanning, which CUB chooses, and what cuDNN needs beyond
copies and a lower bound.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.predict.memory import attention_backends
from dpprof.predict.memory.events import Workspace

_WARP = 32
_MOST_THREADS = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values for each thread (``min_values_per_thread``, ``max_values_per_thread``)."""

_LEAST_FOR_VECTORS = 128
_INT32 = 2**31 - 1


class Processors(NamedTuple):
    """The processors among which a device shares work."""

    multiprocessors: int
    threads: int  # threads that are resident on a multiprocessor

    @classmethod
    def of(cls, multiprocessors: int, compute_capability: str) -> "Processors":
        """Look up the threads (CUDA C++ Programming Guide, technical specifications)."""
        threads = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
        return cls(multiprocessors, threads.get(compute_capability, 2048))


class _Axis(NamedTuple):
    """An axis of the input as the kernel walks it; strides in elements."""

    size: int
    stride: int
    reduced: bool
    stride_out: int


def reduction_buffers(
    x: Tensor, dims: Sequence[int], accumulator_bytes: int, processors: Processors, vector: int = 4
) -> tuple[int, int]:
    """Return the bytes of the buffer for partial results, and of the counters.

    Both are 0 where no results are shared among thread blocks.

    Args:
        x: What is reduced.
        dims: The axes that are reduced; none for all.
        accumulator_bytes: Size of a partial result.
        processors: The device's.
        vector: Elements that a thread loads at once where the reduced axis is contiguous.
    """
    if not x.numel():
        return 0, 0
    return max(
        _buffers_of(part, accumulator_bytes, processors, vector)
        for part in _split_to_32_bits(_walk(x, dims), x.element_size())
    )


def _walk(x: Tensor, dims: Sequence[int]) -> list[_Axis]:
    """Order axes as ``TensorIterator`` does: reduced ones first, then by stride; merge them."""
    reduced = {dim % max(x.dim(), 1) for dim in dims} or set(range(x.dim()))
    axes, stride_out = [], 1
    for dim in reversed(range(x.dim())):
        axes.append(_Axis(x.shape[dim], x.stride(dim), dim in reduced, stride_out))
        stride_out *= 1 if dim in reduced else x.shape[dim]
    axes = sorted(
        (axis for axis in axes if axis.size > 1), key=lambda axis: (not axis.reduced, axis.stride)
    )
    merged: list[_Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last is not None and _continues(last, axis):
            merged[-1] = last._replace(size=last.size * axis.size)
        else:
            merged.append(axis)
    return merged


def _continues(inner: _Axis, outer: _Axis) -> bool:
    return (
        inner.reduced == outer.reduced
        and outer.stride == inner.size * inner.stride
        and (inner.reduced or outer.stride_out == inner.size * inner.stride_out)
    )


def _split_to_32_bits(axes: list[_Axis], item: int) -> list[list[_Axis]]:
    """Halve the widest axis until offsets fit 32 bits (``with_32bit_indexing``)."""
    extent = sum((axis.size - 1) * abs(axis.stride) * item for axis in axes)
    if prod(axis.size for axis in axes) <= _INT32 and extent <= _INT32:
        return [axes]
    widest = max(range(len(axes)), key=lambda i: (axes[i].size - 1) * axes[i].stride)
    half = axes[widest].size // 2
    halves = (half, axes[widest].size - half)
    return [
        part
        for size in dict.fromkeys(halves)
        for part in _split_to_32_bits(
            [axis._replace(size=size) if i == widest else axis for i, axis in enumerate(axes)], item
        )
    ]


def _buffers_of(
    axes: list[_Axis], accumulator_bytes: int, processors: Processors, vector: int
) -> tuple[int, int]:
    over = [axis for axis in axes if axis.reduced]
    kept = [axis for axis in axes if not axis.reduced]
    if not over:
        return 0, 0
    inputs, outputs = (prod(axis.size for axis in some) for some in (over, kept))
    along_x = not kept or over[0].stride < kept[0].stride
    vector_out = 1 if along_x else _vector_of_outputs(axes, kept[0])
    if along_x:
        loads_vectors = over[0].stride == 1 and len(over) == 1 and inputs >= _LEAST_FOR_VECTORS
        wide, high = inputs // vector if loads_vectors else inputs, outputs
    else:
        wide, high = outputs // vector_out, inputs
    width, height = _block(wide, high, _MOST_THREADS // vector_out)
    step_in, step_out = (width, 1) if along_x else (1, width)
    if -(-inputs // step_in) < min(height * 16, _MOST_VALUES):
        return 0, 0  # each warp has results of its own
    values = -(-inputs // (step_in * height))
    grid = -(-(outputs // vector_out) // step_out)
    room = processors.multiprocessors * (processors.threads // (width * height))
    if values < _MOST_VALUES or grid > room:
        return 0, 0
    shares = max(min(-(-room // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    columns = 1 if along_x else width * vector_out
    return (accumulator_bytes * outputs * shares * columns, 4 * grid) if shares > 1 else (0, 0)


def _vector_of_outputs(axes: list[_Axis], kept: _Axis) -> int:
    """Return how many results a thread computes at once (``get_output_vec_size``)."""
    if kept.stride != 1:
        return 1
    multiples = kept.size, *(axis.stride for axis in axes if axis is not kept)
    return next(size for size in (4, 2, 1) if not any(multiple % size for multiple in multiples))


def _block(wide: int, high: int, most: int) -> tuple[int, int]:
    """Return width and height of a thread block (``set_block_dimension``)."""
    wide, high = (1 << (min(max(size, 1), most).bit_length() - 1) for size in (wide, high))
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


aten = torch.ops.aten

_VALUE_AND_INDEX = 16  # bytes of a partial maximum with its index (ReduceMinValuesKernel.cu)


def _welford(x: Tensor, _dim: Any) -> int:
    """Return the size of a mean, a sum of squares and two counts (SharedReduceOps.h)."""
    return 4 * max(x.element_size(), 4)


_PARTIAL_RESULTS: dict[Any, Callable[[Tensor, Any], int]] = {
    **dict.fromkeys(
        (aten.sum, aten.mean, aten.prod, aten.linalg_vector_norm),
        lambda x, _: max(x.element_size(), 4) if x.is_floating_point() else 8,
    ),
    **dict.fromkeys((aten.amax, aten.amin), lambda x, _: x.element_size()),
    **dict.fromkeys((aten.any, aten.all), lambda *_: 1),
    **dict.fromkeys((aten.argmax, aten.argmin), lambda *_: _VALUE_AND_INDEX),
    **dict.fromkeys((aten.var, aten.std, aten.var_mean, aten.std_mean), _welford),
    **dict.fromkeys(
        (aten.max, aten.min),
        lambda x, dim: x.element_size() if dim is None else _VALUE_AND_INDEX,
    ),
}
"""Bytes of a partial result of a reduction, from its input and axes, by overload packet."""


UNKNOWN_WORKSPACES = dict.fromkeys(
    ("convolution", "convolution_backward"),
    "unknown, and counted as 0 bytes beside copies into its layout: cuDNN chooses an algorithm, "
    "and with it the workspace, where it runs; this is freed before the next operator",
)
"""Why no workspace is counted for an operator, by its name."""


def cuda_workspaces(processors: Processors | None) -> Mapping[Any, Workspace]:
    """Return workspaces by overload packet.

    Without the processors of the device reductions allocate nothing.
    """
    always: dict[Any, Workspace] = {
        **attention_backends.WORKSPACES,
        aten.convolution: lambda x, weight, *_: _copies(_find_layout(x, weight), x, weight),
        aten.convolution_backward: lambda gradient, x, weight, *_: _copies(
            _find_layout(x, weight), gradient, x, weight
        ),
        aten.native_group_norm: lambda x, *_: _copies(torch.contiguous_format, x),
        aten.native_group_norm_backward: lambda gradient, x, *_: _copies(
            torch.contiguous_format, gradient, x
        ),
        aten.embedding_dense_backward: _embedding_backward,
        # The product of gradient and result, which is summed (SoftMax.cu).
        aten._softmax_backward_data: lambda gradient, *_, **__: (gradient.nbytes,),  # noqa: SLF001
    }
    if processors is None:
        return always
    return always | {
        **{packet: partial(_reduction, packet, processors) for packet in _PARTIAL_RESULTS},
        aten.native_layer_norm_backward: partial(_norm_backward, processors),
    }


def _copies(layout: torch.memory_format, *tensors: Tensor) -> Sequence[int]:
    """Return the bytes of copies of the tensors that are laid out otherwise."""
    return [x.nbytes for x in tensors if not x.is_contiguous(memory_format=layout)]


def _find_layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return a convolution's layout: channels last where the input or the weight has it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or torch.float64 in {x.dtype, weight.dtype}:
        return torch.contiguous_format
    is_last = (
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()
        for tensor in (x, weight)
    )
    return last if any(is_last) else torch.contiguous_format


def _reduction(
    packet: Any, processors: Processors, x: Tensor, *args: Any, dim: Any = None, **_: Any
) -> Sequence[int]:
    """Return the buffers of a reduction, whose axes follow its input, or the order of a norm."""
    position = 1 if packet is aten.linalg_vector_norm else 0
    dim = args[position] if len(args) > position else dim
    if isinstance(dim, Tensor):
        return ()  # max(x, other) is elementwise
    size = _PARTIAL_RESULTS[packet]
    vector = 2 if size is _welford else 4  # ReduceMomentKernel.cu loads fewer at once
    is_all = dim is None or isinstance(dim, bool)  # a flag may stand in place of axes
    dims = () if is_all else (dim,) if isinstance(dim, int) else dim
    return reduction_buffers(x, dims, size(x, dim), processors, vector)


def _embedding_backward(
    gradient: Tensor, indices: Tensor, rows: int, *_: Any, **__: Any
) -> Sequence[int]:
    """Return sorted indices and partial sums of ten (EmbeddingBackwardKernel.cu)."""
    n, width = indices.numel(), gradient.shape[-1]
    small_enough_for_one_kernel = 3072
    if n <= small_enough_for_one_kernel:
        return ()
    segments = min(n, rows)
    partial = n // 10 + segments
    return *[8 * n] * 3, *[8 * segments] * 2, 8 * partial, 4 * partial * width


def _norm_backward(
    processors: Processors, gradient: Tensor, _x: Tensor, shape: Any, *rest: Any, **options: Any
) -> Sequence[int]:
    """Return partial gradients of weight and bias where rows are many and short.

    Source: layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel``.
    """
    mask = rest[-1] if rest else options["output_mask"]
    width = prod(shape)
    rows = gradient.numel() // max(width, 1)
    many, rows_per_block, most_blocks = 64 * 1024, 32, 32 * 1024
    if rows <= many or width // 32 >= processors.multiprocessors // 2:
        return ()
    blocks = min(most_blocks // -(-width // 32), -(-rows // rows_per_block))
    return [blocks * width * gradient.element_size()] * sum(map(bool, mask[1:]))
