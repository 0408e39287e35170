"""Simulates a CUDA device for fake tensors on the CPU.

Fake CUDA tensors cannot be differentiated in a build without CUDA. So the training is traced on the
CPU, and this module does what a CUDA device does differently. docs/numbers/estimate.md lists all
differences with their sources.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from dpprof.experiments.records.step_costs import WORKSPACE_OF
from dpprof.experiments.records.terms import Phase
from dpprof.predict.memory import attention_backends
from dpprof.predict.memory.quantized_operators import products_of_cuda
from dpprof.private.norms.placement import as_if_on_cuda
from dpprof.private.substitutes import substitute


def is_on_device(tensor: Tensor, phase: Phase, *, counts_too: bool = False) -> bool:
    """Return whether a tensor would be on the device; step counts of most optimizers are not."""
    is_count = phase == "step" and tensor.dim() == 0 and not counts_too
    return not (tensor.is_meta or is_count)


def library_workspaces(compute_capability: str, *threads: str) -> dict[str, int]:
    """Return the bytes that cuBLAS allocates for a handle of each thread and never frees, by name.

    cuBLASLt, which adds a bias to a product, has a workspace of its own before PyTorch 2.13. Later
    it shares cuBLAS's (``TORCH_CUBLASLT_UNIFIED_WORKSPACE``).
    """
    hopper = 9
    is_old = int(compute_capability.partition(".")[0]) < hopper
    nbytes = 8320 * 2**10 if is_old else 32 * 2**20
    workspaces = {f"cuBLAS workspace, {thread}": nbytes for thread in threads}
    if not hasattr(torch.backends.cuda, "blas_workspace_size"):
        workspaces |= {f"cuBLASLt workspace, {thread}": 2**20 for thread in threads}
    return workspaces


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
"""Functions that autocast computes in float32 on CUDA and does not change on the CPU."""

_INTO_FLOAT32 = {Tensor.sum, torch.sum, Tensor.prod, torch.prod}
"""Functions that autocast only gives a dtype (autocast_mode.h, ``AT_FORALL_FP32_SET_OPT_DTYPE``).
Their kernels convert each element as they read it, without a copy."""

_CONVERTING = _IN_FLOAT32 | _INTO_FLOAT32

_FUSED: dict[Any, Any] = {
    **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), torch._softmax),  # noqa: SLF001
    **dict.fromkeys(
        (functional.log_softmax, torch.log_softmax, Tensor.log_softmax),
        torch._log_softmax,  # noqa: SLF001
    ),
}
"""Functions that read float16, and no bfloat16, and write float32 without a copy in between
(SoftMax.cpp). Autocast gives them that dtype (autocast_mode.h)."""


_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_OF_CUDNN = (
    "not modelled: cuDNN runs it whole, and keeps tensors of its own for backward; the operators "
    "that a CPU would run are counted"
)


class _CudaFunctions(TorchFunctionMode):
    """Calls the functions that CUDA would call."""

    def __init__(self, gpu: attention_backends.AttentionGpu, notes: dict[str, str]) -> None:
        super().__init__()
        self._gpu = gpu
        self._notes = notes
        self._instead: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: self._attend,
            functional.dropout: _drop,
            torch.dropout: _drop,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RECURRENT:
            self._notes[f"{WORKSPACE_OF}{func.__name__}"] = _OF_CUDNN
        x: Any = args[0] if args else None
        dtype = kwargs.get("dtype")
        is_reduced = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        if func in _CONVERTING and is_reduced:
            is_autocast = torch.is_autocast_enabled("cpu")
            is_widened = dtype is torch.float32 or (dtype is None and is_autocast)
            if func in _FUSED and is_widened and x.dtype is torch.float16:
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                return _FUSED[func](x, dim, half_to_float=True)
            if is_autocast and func in _IN_FLOAT32:
                args = (x.float(), *args[1:])
            elif is_autocast and dtype is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        return self._instead.get(func, func)(*args, **kwargs)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward with this mode active, because checkpointing runs forward again in it.

        ``Tensor.backward`` is a function that this mode handles, and no mode is active in its own
        handler.
        """
        if self in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return _engine_run_backward(*args, **kwargs)
        with self:
            return _engine_run_backward(*args, **kwargs)

    def _attend(  # noqa: PLR0917 (as the function itself)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        q, k, v, mask = map(_cast, (query, key, value, attn_mask))
        call = attention_backends.AttentionCall(q, k, v, mask, dropout_p, is_causal, enable_gqa)
        backend, why = attention_backends.choose_backend(call, self._gpu)
        self._notes[f"attention: {backend}"] = why
        return attention_backends.run_backend(backend, call, scale)


def _cast(x: Any) -> Any:
    """Do what autocast does with an operand of attention (autocast_mode.h, ``cached_cast``)."""
    is_cast = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float16)
    if not (is_cast and torch.is_autocast_enabled("cpu")):
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


@contextmanager
def like_cuda(compute_capability: str) -> Iterator[dict[str, str]]:
    """Have PyTorch decide within as it does for CUDA tensors.

    Yields:
        Each choice with its reason; it grows as choices are made.
    """
    notes: dict[str, str] = {}
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    gpu = attention_backends.AttentionGpu(compute_capability, cudnn)
    # By name in sys.modules: torch.optim removes these modules from its own attributes.
    optimizers = importlib.import_module("torch.optim.optimizer")
    adam = importlib.import_module("torch.optim.adam")
    types = [*optimizers._foreach_supported_types, FakeTensor]  # noqa: SLF001
    # Optimizers decide by these whether to update all parameters at once, and where they count.
    with (
        as_if_on_cuda(),
        products_of_cuda(),
        substitute(optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]),
        substitute(optimizers, "_foreach_supported_types", types),
        substitute(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"]),
        _CudaFunctions(gpu, notes) as functions,
        substitute(torch.autograd, "_engine_run_backward", functions.run_backward),
    ):
        yield notes
