"""Refuses tensors that the code of clipping and noise is not exact for.

That code takes tensors to be dense numbers in memory of their own, real or complex, and operators
to do with them what PyTorch's do. It refuses others by name: trained parameters when a clipping is
made and in each backward, inputs where a layer runs, and losses.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from dpprof.private.errors import UnsupportedError, refuse_other_class
from dpprof.private.ranks.ranks import is_distributed

NUMBERS = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.complex64, torch.complex128, torch.complex32),
)
"""The dtypes of numbers that have norms, sums and noise."""

_OWN_CODE = "__torch_dispatch__"


def refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    """Refuse to train a parameter whose sum, noise or step would not be exact.

    ``UnsupportedError``: it is sparse, nested, lazy, on ``meta``, of a dtype with fewer than 16
    bits, of a class with functions of its own, or has elements that share memory.
    """
    what = find_unusual(parameter)
    if is_lazy(parameter):
        what = "not initialised; run the model on a batch before its clipping is made"
    elif what is None and _has_own_functions(parameter):
        what = f"a {type(parameter).__name__}, whose functions are its own; make it a Parameter"
    elif what is None and not parameter.is_contiguous() and _shares_memory(parameter):
        what = "expanded, or has elements that share memory otherwise; make it a clone()"
    if what is not None:
        raise UnsupportedError(f"{name} is trained and is {what}, or freeze it")


def refuse_inputs(layer: nn.Module, inputs: Iterable[Any], *, may_be_sparse: bool = False) -> None:
    """Refuse to run a layer on tensors that its rule does not know (``UnsupportedError``)."""
    for x in inputs:
        what = find_unusual(x) if isinstance(x, Tensor) else None
        if what is not None and not (may_be_sparse and is_sparse(x)):
            name = type(layer).__name__
            raise UnsupportedError(f"{name} got an input that is {what}, or freeze its parameters")


def refuse_losses(losses: Tensor) -> None:
    """Refuse losses that clipping factors cannot be computed of.

    ``ValueError``: they are not one for each sample, dense, in float32 or float64; or autograd
    is off for good.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients do not exist in inference mode; call backward outside of it")
    refuse_other_class("losses", losses, Tensor)
    what = find_no_bytes(losses)
    if what is not None:
        raise ValueError(f"losses are {what}")
    if losses.dim() != 1:
        raise ValueError(
            f"losses must be one for each sample, (B,), and have shape {tuple(losses.shape)}; "
            "compute them with reduction='none', and average over what a sample has"
        )
    # torch.zeros(0) stands for a batch without samples, and has the default dtype.
    is_none = not len(losses) and not losses.requires_grad
    if losses.dtype not in (torch.float32, torch.float64) and not is_none:
        # A clipping factor that is rounded up would let a sample exceed the bound.
        raise ValueError(
            f"losses must be float32 or float64, and are {losses.dtype}; compute them of "
            "outputs.float()"
        )


def find_unusual(x: Tensor) -> str | None:
    """Name what is unusual of a tensor, and say what to do; None for an ordinary one."""
    if x.is_floating_point() and x.dtype not in NUMBERS:
        return f"{x.dtype}; keep it in bfloat16, float16, float32 or float64, and cast a copy"
    return find_no_bytes(x)


def find_no_bytes(x: Tensor) -> str | None:
    """Name why a tensor's numbers do not lie in memory alone, and say what to do; None if so."""
    if x.is_nested:
        return "a nested tensor; pad it (torch.nested.to_padded_tensor)"
    if is_sparse(x):
        return f"sparse ({x.layout}); make it dense (to_dense())"
    if x.is_quantized:
        return f"quantised ({x.dtype}); make it real numbers (dequantize())"
    if x.device.type == "meta":
        return "on meta, without values; put it on a device with them (to_empty() has none)"
    own = getattr(type(x), _OWN_CODE)
    if own is not getattr(Tensor, _OWN_CODE) and not (
        isinstance(x, FakeTensor) or is_distributed(x)
    ):
        return f"a {type(x).__name__}, which has operators of its own; make it a plain tensor"
    return None


def is_sparse(x: Tensor) -> bool:
    """Tell whether a tensor keeps some of its numbers alone, or in blocks of its own."""
    return x.layout is not torch.strided and not x.is_nested


def _has_own_functions(parameter: nn.Parameter) -> bool:
    """Tell whether a class other than PyTorch's runs code in place of functions."""
    if isinstance(parameter, FakeTensor) or is_distributed(parameter):
        return False
    plain = (nn.Parameter.__torch_function__, vars(Tensor)["__torch_function__"].__func__)
    own = type(parameter).__torch_function__
    return getattr(own, "__func__", own) not in plain


def _shares_memory(x: Tensor) -> bool:
    """Tell whether elements may lie at one place, as those of ``expand`` do."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
