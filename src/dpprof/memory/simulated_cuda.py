"""What a CUDA device would do differently, for fake tensors that live on the CPU.

Fake CUDA tensors cannot be differentiated in a build without CUDA, so the training is
traced on the CPU and everything in which a CUDA device differs is put in here, each with
its source. docs/numbers/estimate.md says which of it was checked on a GPU.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpprof.memory import attention_backends
from dpprof.memory.recorder import Workspace
from dpprof.norms.placement import as_if_on_cuda
from dpprof.records.terms import Phase
from dpprof.system.substitutes import substitute

aten = torch.ops.aten


class Choices(NamedTuple):
    """What is modelled; every one of them can be switched off."""

    blocks: bool = True
    """Round every size up to 512 bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""

    libraries: bool = True
    """Hold a cuBLAS workspace for each of the two threads that have a handle, forward's and
    backward's (ATen/cuda/CublasHandlePool.cpp)."""

    attention: bool = True
    """Run the kernels that CUDA would choose (``memory.attention_backends``)."""

    foreach: bool = True
    """Let optimizers work on all parameters at once, CUDA's default (torch/optim/optimizer.py,
    ``_default_to_fused_or_foreach``)."""

    dropout: bool = True
    """Keep a mask of one byte an element (ATen/native/Dropout.cpp, native_dropout)."""

    autocast: bool = True
    """Compute norms and softmax in float32 under autocast (ATen/autocast_mode.h)."""

    kernels: bool = True
    """Find norms of flash clipping by its Triton kernels, which allocate next to nothing
    (norms/triton_kernels.py)."""

    workspaces: bool = True
    """Take what kernels allocate and release within an operator."""


EVERYTHING = Choices()
BLOCK_BYTES = 512


def is_on_device(tensor: Tensor, phase: Phase) -> bool:
    """Tell what would be on the device: optimizers keep their step counts on the host."""
    return not tensor.is_meta and not (phase == "step" and tensor.dim() == 0)


def library_workspace(compute_capability: str) -> int:
    """Say how many bytes cuBLAS takes from the allocator for each handle, for good."""
    hopper = 9
    is_old = int(compute_capability.partition(".")[0]) < hopper
    return 8320 * 2**10 if is_old else 32 * 2**20


def _embedding_backward(_gradient: Tensor, indices: Tensor, rows: int, *_: Any, **__: Any) -> int:
    """Sorted indices, and sums of ten at a time (EmbeddingBackwardKernel.cu)."""
    n, width = indices.numel(), _gradient.shape[-1]
    small_enough_for_one_kernel = 3072
    if n <= small_enough_for_one_kernel:
        return 0
    segments = min(n, rows)
    partial = n // 10 + segments
    return 8 * (3 * n + 2 * segments + partial) + 4 * partial * width


WORKSPACES: Mapping[Any, Workspace] = {
    **attention_backends.WORKSPACES,
    aten.embedding_dense_backward: _embedding_backward,
}
"""What CUDA's kernels take and give back, by overload packet."""


def _drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return x
    dropped = torch.native_dropout(x, p, train=True)[0]
    return x.copy_(dropped) if inplace else dropped


_IN_FLOAT32 = {
    *(functional.layer_norm, torch.layer_norm, functional.group_norm, torch.group_norm),
    *(functional.rms_norm, torch.rms_norm, functional.softmax, torch.softmax, Tensor.softmax),
    *(functional.log_softmax, torch.log_softmax, Tensor.log_softmax, Tensor.pow, torch.pow),
    *(Tensor.exp, torch.exp, torch.rsqrt, Tensor.rsqrt, Tensor.norm),
    *(torch.linalg.vector_norm, Tensor.cumsum, torch.cumsum),
}
"""Functions that autocast computes in float32 on CUDA and leaves alone on the CPU."""

_INTO_FLOAT32 = {Tensor.sum, torch.sum, Tensor.prod, torch.prod}
"""Those to which it only gives a dtype (autocast_mode.h, ``AT_FORALL_FP32_SET_OPT_DTYPE``), and
whose kernels turn each element into float32 as they read it: no copy is made."""


class _CudaFunctions(TorchFunctionMode):
    """Calls what CUDA would call."""

    def __init__(
        self, choices: Choices, gpu: attention_backends.Gpu, notes: dict[str, str]
    ) -> None:
        super().__init__()
        self._autocast = choices.autocast
        self._gpu = gpu
        self._notes = notes
        self._instead: dict[Any, Callable[..., Any]] = {}
        if choices.attention:
            self._instead[functional.scaled_dot_product_attention] = self._attend
        if choices.dropout:
            self._instead |= {functional.dropout: _drop, torch.dropout: _drop}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._autocast and func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = (_in_float32(args[0]), *args[1:])
        if self._autocast and func in _INTO_FLOAT32 and torch.is_autocast_enabled("cpu"):
            kwargs = _into_float32(args[0], kwargs)
        return self._instead.get(func, func)(*args, **kwargs)

    def _attend(  # noqa: PLR0917 (as the function itself)
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> Any:
        asked = attention_backends.Asked(q, k, v, attn_mask, dropout_p, is_causal)
        choice = attention_backends.choose_backend(asked, self._gpu)
        self._notes[f"attention: {choice.backend}"] = choice.why
        return attention_backends.run_backend(choice.backend, asked, scale)


def _is_reduced(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _in_float32(value: Any) -> Any:
    return value.float() if _is_reduced(value) else value


def _into_float32(value: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    asks = kwargs.get("dtype") is not None or not _is_reduced(value)
    return kwargs if asks else {**kwargs, "dtype": torch.float32}


@contextmanager
def like_cuda(compute_capability: str, choices: Choices = EVERYTHING) -> Iterator[dict[str, str]]:
    """Have PyTorch decide within as it would for CUDA tensors.

    Args:
        compute_capability: Of the device.
        choices: What is modelled.

    Yields:
        What was chosen, with the reason; it grows as choices are made.
    """
    notes: dict[str, str] = {}
    gpu = attention_backends.Gpu(compute_capability, torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    # By name in sys.modules: torch.optim removes this module from its own attributes.
    optimizers = importlib.import_module("torch.optim.optimizer")
    devices = ["cpu", "cuda"] if choices.foreach else ["cuda"]
    types = [*optimizers._foreach_supported_types, FakeTensor]  # noqa: SLF001
    # By these two alone optimizers decide whether to work on all parameters at once.
    with (
        as_if_on_cuda(autocast=choices.autocast, products=choices.kernels, kernels=choices.kernels),
        substitute(optimizers, "_get_foreach_kernels_supported_devices", lambda: devices),
        substitute(optimizers, "_foreach_supported_types", types),
        _CudaFunctions(choices, gpu, notes),
    ):
        yield notes
