"""Computes in float64 the parts of a Hugging Face model that are float32 in any dtype.

Such models compute norms, softmax and rotary angles in float32 even if their weights are float64.
There, two right ways to the same gradient differ by 1e-7, and an error of this size in a method
could not be distinguished from rounding. In float64 they agree to 1e-9.

This proves that a method differentiates the model's formulas. It does not prove anything about
float32 rounding, with which the model really trains. Only calls from ``transformers`` and ``peft``
are lifted. A method that itself computes in float32 still fails.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpprof.private.substitutes import substitute

_LIBRARIES = ("transformers", "peft")


@contextmanager
def lift_float32() -> Iterator[None]:
    """Compute in float64 where the libraries' models compute in float32.

    The context must cover the backward pass too, in which blocks are computed again. Tensors that
    are created without a dtype are float64 too.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    mode = _Lift()
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # noqa: SLF001

    def run_backward_lifted(*args: Any, **kwargs: Any) -> Any:
        # torch switches a mode off while a function runs for which the mode was asked, and
        # backward is one.
        with mode:
            return run_backward(*args, **kwargs)

    try:
        with mode, substitute(torch.autograd, "_engine_run_backward", run_backward_lifted):
            yield
    finally:
        torch.set_default_dtype(before)


class _Lift(TorchFunctionMode):
    """Replaces float32 in the arguments of the libraries' calls of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and _is_from_a_library():
            return Tensor.double(*args, **kwargs)
        named = any(argument is torch.float32 for argument in (*args, *kwargs.values()))
        if named and _is_from_a_library():
            args = tuple(map(_lift, args))
            kwargs = {name: _lift(argument) for name, argument in kwargs.items()}
        return func(*args, **kwargs)


def _lift(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _is_from_a_library() -> bool:
    """Tell whether the innermost caller is a library's, beside torch and modes like this one."""
    frame = sys._getframe(2)  # noqa: SLF001 (the only way to a caller)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        is_mode = frame.f_code.co_name == "__torch_function__"
        if package not in ("torch", "contextlib") and not is_mode:
            return package in _LIBRARIES
        frame = frame.f_back
    return False
