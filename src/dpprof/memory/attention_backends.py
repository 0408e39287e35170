"""Which kernel ``scaled_dot_product_attention`` runs on a CUDA device, and what its backward takes.

The choice is PyTorch's (ATen/native/transformers/cuda/sdp_utils.cpp, ``priority_order`` and the
``can_use_..._attention``), for dense tensors. Left out are grouped queries, nested tensors, and
GPUs of compute capability below 8.0.

Shape legend: B samples, H heads, M queries, N keys, K head width.
"""

import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

Backend = Literal["cudnn", "flash", "efficient", "math"]

_REDUCED = (torch.bfloat16, torch.float16)
_PREFERS_CUDNN = ("9.0", "10.0")
_NEWER_THAN = 91500
"""cuDNN's version from which its attention comes first there (``check_prefer_cudnn_attention``)."""


class Gpu(NamedTuple):
    """What the choice depends on beside the tensors."""

    compute_capability: str
    cudnn: int | None = None
    """As ``torch.backends.cudnn.version()`` says it. None for a version that is not known, as in a
    build without CUDA: it is taken for that of PyTorch's own wheels, which since 2.11 is newer
    than 9.15."""


class Asked(NamedTuple):
    """One call of attention."""

    q_BHMK: Tensor
    k_BHNK: Tensor
    v_BHNK: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Width of queries and of values."""
        return self.q_BHMK.shape[-1], self.v_BHNK.shape[-1]


class Choice(NamedTuple):
    """The kernel that runs, and why."""

    backend: Backend
    why: str


def choose_backend(asked: Asked, gpu: Gpu) -> Choice:
    """Say which kernel PyTorch would run."""
    prefers, why = _prefers_cudnn(gpu)
    order: tuple[Backend, ...] = ("flash", "efficient", "math")
    tried: list[str] = []
    for backend in ("cudnn", *order) if prefers else order:
        objection = _OBJECTIONS[backend](asked, gpu)
        if objection is None:
            return Choice(backend, "; ".join([why, *tried]))
        tried.append(f"{backend} takes {objection}")
    raise RuntimeError(f"no attention is enabled: {'; '.join(tried)}")


def _prefers_cudnn(gpu: Gpu) -> tuple[bool, str]:
    where = f"compute capability {gpu.compute_capability}"
    if gpu.compute_capability not in _PREFERS_CUDNN:
        return False, f"flash attention comes first on {where}"
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False, "TORCH_CUDNN_SDPA_DEPRIORITIZED is set"
    if gpu.cudnn is None:
        return True, f"cuDNN's comes first on {where}, if cuDNN is newer than 9.15"
    is_newer = gpu.cudnn > _NEWER_THAN
    come = "cuDNN's comes" if is_newer else "flash attention comes"
    return is_newer, f"{come} first on {where} with cuDNN {gpu.cudnn}"


def _object_to_cudnn(asked: Asked, gpu: Gpu) -> str | None:
    limit = 256 if gpu.compute_capability == "9.0" else 128
    no_sequence = asked.k_BHNK.shape[2] == 1 or (asked.q_BHMK.shape[2] == 1 and asked.dropout > 0)
    strict = torch.are_deterministic_algorithms_enabled()
    return _first_of(
        (not _is_enabled("cudnn"), "nothing: it is switched off"),
        (asked.q_BHMK.dtype not in _REDUCED, "16 bits alone"),
        (
            strict and not torch.is_deterministic_algorithms_warn_only_enabled(),
            "nothing where algorithms must be deterministic",
        ),
        (any(width % 8 for width in asked.widths), "heads of a multiple of 8 alone"),
        (max(asked.widths) > limit, f"heads of at most {limit} alone"),
        (no_sequence, "no sequence of one token"),
    )


def _object_to_flash(asked: Asked, _gpu: Gpu) -> str | None:
    return _first_of(
        (not _is_enabled("flash"), "nothing: it is switched off"),
        (asked.q_BHMK.dtype not in _REDUCED, "16 bits alone"),
        (asked.mask is not None, "no mask"),
        (max(asked.widths) > 256, "heads of at most 256 alone"),  # noqa: PLR2004
        (len(set(asked.widths)) > 1, "queries and values of one width alone"),
        (
            asked.causal and asked.q_BHMK.shape[2] != asked.k_BHNK.shape[2],
            "as many queries as keys alone, where it is causal",
        ),
    )


def _object_to_efficient(asked: Asked, _gpu: Gpu) -> str | None:
    aligned = 8 if asked.q_BHMK.dtype in _REDUCED else 4
    return _first_of(
        (not _is_enabled("mem_efficient"), "nothing: it is switched off"),
        (asked.q_BHMK.dtype not in (*_REDUCED, torch.float32), "32 bits at most"),
        (any(width % aligned for width in asked.widths), f"heads of a multiple of {aligned} alone"),
    )


def _object_to_math(_asked: Asked, _gpu: Gpu) -> str | None:
    return None if _is_enabled("math") else "nothing: it is switched off"


_OBJECTIONS: dict[Backend, Callable[[Asked, Gpu], str | None]] = {
    "cudnn": _object_to_cudnn,
    "flash": _object_to_flash,
    "efficient": _object_to_efficient,
    "math": _object_to_math,
}


def _is_enabled(backend: str) -> bool:
    enabled: bool = getattr(torch.backends.cuda, f"{backend}_sdp_enabled")()
    return enabled


def _first_of(*objections: tuple[bool, str]) -> str | None:
    return next((said for holds, said in objections if holds), None)


def run_backend(backend: Backend, asked: Asked, scale: float | None) -> Any:
    """Call the operator that a choice stands for; (B, H, M, K)."""
    q, k, v, mask, dropout, causal = asked
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    learns = any(one.requires_grad for one in (q, k, v))
    match backend:
        case "cudnn":
            return aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
                q, k, v, mask, learns, dropout, causal, scale=scale
            )[0]
        case "flash":
            return aten._scaled_dot_product_flash_attention(  # noqa: SLF001
                q, k, v, dropout, causal, scale=scale
            )[0]
        case "efficient":
            return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
                q, k, v, mask, learns, dropout, causal, scale=scale
            )[0]
        case "math":
            return aten._scaled_dot_product_attention_math(  # noqa: SLF001
                q, k, v, mask, dropout, causal, scale=scale
            )[0]


def take_flash_backward(_gradient: Tensor, q: Tensor, *_: Any, **__: Any) -> int:
    """A float32 gradient of the queries, and softmax's sums (flash_api.cpp, mha_bwd)."""
    B, H, M, K = q.shape
    rows = -(-M // 128) * 128
    return 4 * B * H * rows * (1 + -(-K // 32) * 32)


def take_efficient_backward(_gradient: Tensor, q: Tensor, *_: Any, **__: Any) -> int:
    """Delta, with the product that gives it or the accumulators of the queries' gradient.

    Source: mem_eff_attention/kernel_backward.h, attention_backward.cu.
    """
    B, H, M, K = q.shape
    accumulators = B * H * -(-M // 64) * -(-K // 64) * 16_400
    product = 4 * B * M * H * (K + 1) if q.dtype is torch.float32 else 0
    return 4 * B * H * M + max(product, accumulators)


def take_cudnn_backward(_gradient: Tensor, q: Tensor, *_: Any, **__: Any) -> int:
    """A float32 gradient of the queries, and softmax's sums: the least that it takes.

    Those are tensors of the graph that cudnn-frontend builds (``CompositeSDPABackwardNode``); what
    the engine takes beside them cuDNN tells only where it runs.
    """
    B, H, M, K = q.shape
    return 4 * B * H * M * (K + 1)


WORKSPACES = {
    aten._scaled_dot_product_flash_attention_backward: take_flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward: take_efficient_backward,  # noqa: SLF001
    aten._scaled_dot_product_cudnn_attention_backward: take_cudnn_backward,  # noqa: SLF001
}
"""What backward takes and gives back, by overload packet."""

LEAST = {
    "_scaled_dot_product_cudnn_attention_backward": "what cuDNN takes for attention's backward is "
    "not known before it runs; a float32 gradient of the queries, and softmax's sums, are the "
    "least, and are what is counted"
}
"""By operator, why the workspace that is counted for it is a lower bound."""
