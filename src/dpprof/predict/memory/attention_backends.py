"""The kernel that ``scaled_dot_product_attention`` runs on CUDA, and its backward's workspace.

The choice follows PyTorch (ATen/native/transformers/cuda/sdp_utils.cpp, ``priority_order`` and the
``can_use_..._attention``) for dense tensors. Left out are nested tensors, and GPUs of compute
capability below 7.0.

Shape legend: B samples, H heads, G heads of keys and values, M queries, N keys, K head width.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

Backend = Literal["cudnn", "flash", "efficient", "math"]

_REDUCED = (torch.bfloat16, torch.float16)
_AMPERE = 8
"""The first major compute capability with flash attention and units for bfloat16."""

_PREFERS_CUDNN = ("9.0", "10.0")
_NEWER_THAN = 91500
"""PyTorch prefers cuDNN's attention in versions above this (``check_prefer_cudnn_attention``)."""


class AttentionGpu(NamedTuple):
    """Properties of a GPU on which the choice of a kernel depends."""

    compute_capability: str
    cudnn: int | None = None
    """The result of ``torch.backends.cudnn.version()``. None without CUDA: then the version of
    PyTorch's own wheels is assumed, which since 2.11 is newer than 9.15."""


class AttentionCall(NamedTuple):
    """One call of attention."""

    q_BHMK: Tensor
    k_BGNK: Tensor
    v_BGNK: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    """Whether several heads of queries may share one of keys and values, ``enable_gqa``."""


def choose_backend(call: AttentionCall, gpu: AttentionGpu) -> tuple[Backend, str]:
    """Return the kernel that PyTorch would run, with the reason."""
    prefers, why = _prefers_cudnn(gpu)
    order: tuple[Backend, ...] = ("flash", "efficient", "math")
    reasons: list[str] = []
    for backend in ("cudnn", *order) if prefers else order:
        obstacle = _find_obstacle(backend, call, gpu)
        if obstacle is None:
            return backend, "; ".join([why, *reasons])
        reasons.append(f"{backend} {obstacle}")
    raise RuntimeError(f"no attention is enabled: {'; '.join(reasons)}")


def _prefers_cudnn(gpu: AttentionGpu) -> tuple[bool, str]:
    where = f"compute capability {gpu.compute_capability}"
    if gpu.compute_capability not in _PREFERS_CUDNN:
        return False, f"flash attention is preferred on {where}"
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False, "TORCH_CUDNN_SDPA_DEPRIORITIZED is set"
    if gpu.cudnn is None or gpu.cudnn > _NEWER_THAN:
        return True, f"cuDNN's is preferred on {where}, if cuDNN is newer than 9.15"
    return False, f"flash attention is preferred on {where} with cuDNN {gpu.cudnn}"


def _find_obstacle(backend: Backend, call: AttentionCall, gpu: AttentionGpu) -> str | None:
    switch = "mem_efficient" if backend == "efficient" else backend
    if not getattr(torch.backends.cuda, f"{switch}_sdp_enabled")():
        return "is switched off"
    obstacles = _list_obstacles(call, gpu).get(backend, [])
    return next((obstacle for applies, obstacle in obstacles if applies), None)


def _list_obstacles(
    call: AttentionCall, gpu: AttentionGpu
) -> dict[Backend, list[tuple[bool, str]]]:
    """Return what keeps backends from running calls, and whether it applies to a call."""
    queries, keys, dtype = call.q_BHMK.shape[2], call.k_BGNK.shape[2], call.q_BHMK.dtype
    widths = call.q_BHMK.shape[-1], call.v_BGNK.shape[-1]
    limit = 256 if gpu.compute_capability == "9.0" else 128
    no_sequence = keys == 1 or (queries == 1 and call.dropout > 0)
    strict = torch.are_deterministic_algorithms_enabled()
    strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
    aligned = 8 if dtype in _REDUCED else 4
    is_old = int(gpu.compute_capability.partition(".")[0]) < _AMPERE
    if is_old and dtype is torch.float32:
        aligned = 1  # no tensor core multiplies it (``minimum_gemm_alignment``)
    too_old = "needs compute capability 8.0"
    shares_heads = call.q_BHMK.shape[1] != call.k_BGNK.shape[1]
    return {
        "cudnn": [
            (dtype not in _REDUCED, "needs 16 bits"),
            (strict, "is not deterministic"),
            (any(width % 8 for width in widths), "needs heads of a multiple of 8"),
            (max(widths) > limit, f"needs heads of at most {limit}"),
            (no_sequence, "does not take sequences of one token"),
        ],
        "flash": [
            (is_old, too_old),
            (dtype not in _REDUCED, "needs 16 bits"),
            (call.mask is not None, "does not take a mask"),
            (max(widths) > 256, "needs heads of at most 256"),  # noqa: PLR2004
            (len(set(widths)) > 1, "needs queries and values of one width"),
            (call.causal and queries != keys, "needs as many queries as keys where it is causal"),
        ],
        "efficient": [
            (dtype not in (*_REDUCED, torch.float32), "needs 32 bits at most"),
            (is_old and dtype is torch.bfloat16, f"in bfloat16 {too_old}"),
            (shares_heads, "needs as many heads of keys as of queries"),
            (any(width % aligned for width in widths), f"needs heads of a multiple of {aligned}"),
        ],
    }


def run_backend(backend: Backend, call: AttentionCall, scale: float | None) -> Any:
    """Call the operator of a backend; returns (B, H, M, K)."""
    q, k, v, mask, dropout, causal, grouped = call
    if mask is not None and mask.dtype is torch.bool:
        hidden, seen = (torch.scalar_tensor(x, dtype=q.dtype) for x in (float("-inf"), 0.0))
        mask = torch.where(mask, seen, hidden)
    if backend == "math":
        return aten._scaled_dot_product_attention_math(  # noqa: SLF001
            q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
        )[0]
    needs_gradient = any(tensor.requires_grad for tensor in (q, k, v))
    options = (dropout,) if backend == "flash" else (mask, needs_gradient, dropout)
    attend = getattr(aten, f"_scaled_dot_product_{backend}_attention")
    return attend(q, k, v, *options, causal, scale=scale)[0]


def _flash_backward(_gradient: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    """Return a float32 gradient of the queries and softmax's sums (flash_api.cpp, mha_bwd).

    Where heads share keys and values, their gradients come one for each head of queries first.
    """
    B, H, M, K = q.shape
    rows = -(-M // 128) * 128
    sizes = 4 * B * H * rows * (-(-K // 32) * 32), 4 * B * H * rows
    by_head = B * H * k.shape[2] * K * k.element_size()
    return sizes if k.shape[1] == H else (*sizes, by_head, by_head)


def _efficient_backward(_gradient: Tensor, q: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    """Return delta, with its product or the accumulators of the queries' gradient.

    Source: mem_eff_attention/kernel_backward.h, attention_backward.cu.
    """
    B, H, M, K = q.shape
    accumulators = B * H * -(-M // 64) * -(-K // 64) * 16_400
    product = 4 * B * M * H * (K + 1) if q.dtype is torch.float32 else 0
    return 4 * B * H * M, max(product, accumulators)


def _cudnn_backward(_gradient: Tensor, q: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    """Return a float32 gradient of the queries and softmax's sums, a lower bound.

    cudnn-frontend's graph has these tensors (``CompositeSDPABackwardNode``); what the engine
    allocates beyond these is known only where it runs.
    """
    B, H, M, K = q.shape
    return 4 * B * H * M * K, 4 * B * H * M


WORKSPACES = {
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,  # noqa: SLF001
    aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,  # noqa: SLF001
}
"""What backward allocates and frees, by overload packet."""

LOWER_BOUNDS = {
    "_scaled_dot_product_cudnn_attention_backward": "cuDNN's workspace is known only after it ran; "
    "a lower bound is counted: a float32 gradient of the queries, and softmax's sums"
}
"""Why the workspace that is counted for an operator is a lower bound."""
