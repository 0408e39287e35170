"""What CUDA kernels allocate and free themselves, by formula.

Left out: scratch memory of sorting and scanning (CUB decides on it), and what cuDNN needs beyond a
lower bound.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from dpprof.memory import attention_backends
from dpprof.memory.recorder import Workspace
from dpprof.memory.reduction_buffers import Processors, reduction_buffers

aten = torch.ops.aten

_VALUE_AND_INDEX = 16
"""Bytes of a partial maximum with its index (ReduceMinValuesKernel.cu)."""


def cuda_workspaces(processors: Processors | None) -> Mapping[Any, Workspace]:
    """Return workspaces by overload packet.

    Args:
        processors: Of the device; where they are not known, reductions allocate nothing.
    """
    always: dict[Any, Workspace] = {
        **attention_backends.WORKSPACES,
        aten.embedding_dense_backward: _embedding_backward,
    }
    if processors is None:
        return always
    sizes: dict[Any, Callable[[Tensor], int]] = {
        **dict.fromkeys((aten.sum, aten.mean, aten.prod), _accumulator),
        **dict.fromkeys((aten.amax, aten.amin), Tensor.element_size),
        **dict.fromkeys((aten.any, aten.all), lambda _: 1),
        **dict.fromkeys((aten.argmax, aten.argmin), lambda _: _VALUE_AND_INDEX),
        # Welford's mean, sum of squares and two counts (SharedReduceOps.h, WelfordData).
        **dict.fromkeys((aten.var, aten.std, aten.var_mean, aten.std_mean), _welford),
    }
    return always | {
        **{packet: _reduction(size, processors) for packet, size in sizes.items()},
        **dict.fromkeys((aten.max, aten.min), _maximum(processors)),
        aten.linalg_vector_norm: _vector_norm(processors),
        aten.native_layer_norm_backward: _norm_backward(processors),
    }


def _accumulator(x: Tensor) -> int:
    """Return the size of a partial sum: at least float32, or int64."""
    return max(x.element_size(), 4) if x.is_floating_point() else 8


def _welford(x: Tensor) -> int:
    return 4 * max(x.element_size(), 4)


def _reduction(size: Callable[[Tensor], int], processors: Processors) -> Workspace:
    """Of reductions whose second argument, if any, is an axis, axes, or a flag."""
    vector = 2 if size is _welford else 4  # ReduceMomentKernel.cu loads fewer at once

    def buffers(x: Tensor, dim: Any = None, *_: Any, **__: Any) -> Sequence[int]:
        return reduction_buffers(x, _axes(dim), size(x), processors, vector)

    return buffers


def _vector_norm(processors: Processors) -> Workspace:
    """Of a norm, whose second argument is its order."""

    def buffers(x: Tensor, _order: Any = 2, dim: Any = None, *_: Any, **__: Any) -> Sequence[int]:
        return reduction_buffers(x, _axes(dim), _accumulator(x), processors)

    return buffers


def _maximum(processors: Processors) -> Workspace:
    """Of ``max(x)``, ``max(x, dim)``; of ``max(x, other)`` nothing."""

    def buffers(x: Tensor, dim: Any = None, *_: Any, **__: Any) -> Sequence[int]:
        if isinstance(dim, Tensor):
            return ()
        size = x.element_size() if dim is None else _VALUE_AND_INDEX
        return reduction_buffers(x, _axes(dim), size, processors)

    return buffers


def _axes(dim: Any) -> Sequence[int]:
    """Return the axes that are reduced; none for all, which a flag in their place means too."""
    if isinstance(dim, bool) or dim is None:
        return ()
    return (dim,) if isinstance(dim, int) else dim


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


def _norm_backward(processors: Processors) -> Workspace:
    """Return partial gradients of weight and bias where rows are many and short.

    Source: layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel``.
    """

    def partial_sums(
        gradient: Tensor, _x: Tensor, shape: Any, *rest: Any, **kwargs: Any
    ) -> Sequence[int]:
        mask = rest[-1] if rest else kwargs["output_mask"]
        width = prod(shape)
        rows = gradient.numel() // max(width, 1)
        many, rows_per_block, most_blocks = 64 * 1024, 32, 32 * 1024
        if rows <= many or width // 32 >= processors.multiprocessors // 2:
            return ()
        blocks = min(most_blocks // -(-width // 32), -(-rows // rows_per_block))
        return [blocks * width * gradient.element_size()] * sum(map(bool, mask[1:]))

    return partial_sums
