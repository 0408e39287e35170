"""Where backward would write in place, if no dispatch mode were active.

PyTorch's backward formulas write into fresh zeros, and its engine adds the gradients of a tensor
that was used twice into the first of them. Both copy instead where a dispatch mode is active
(``isTensorSubclassLike`` in ATen/TensorSubclassLikeUtils.h), so a recorder sees allocations that a
bare run never makes.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._functorch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

INTO_FRESH: dict[Any, Any] = {
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_put.default: aten.index_put_.default,
    aten.logical_and.default: aten.logical_and_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""Operators of backward formulas (FunctionsManual.cpp), and what runs without a dispatch mode where
their first argument was allocated by the formula itself."""

_ENGINE = _engine_run_backward.__code__
_OWN = str(Path(__file__).parent)
_FUNCTORCH = str(Path(torch._functorch.__file__).parent)  # noqa: SLF001 (torch.func's own code)


def find_in_place(func: Any, args: Any, *, fresh: bool) -> Any:
    """Return the in-place operator that would run without a dispatch mode; None for none.

    ``fresh`` says whether the backward node that is running allocated the first argument.
    """
    if func is aten.add.Tensor:
        runs_in_place = not fresh and _engine_would_accumulate(args)
        return aten.add_.Tensor if runs_in_place else None
    return INTO_FRESH[func] if fresh and _is_called_by_engine() else None


def _engine_would_accumulate(args: Any) -> bool:
    """Return whether these are gradients that the engine adds up (input_buffer.cpp)."""
    held, new = args[0], args[1]
    return (
        isinstance(held, Tensor)
        and isinstance(new, Tensor)
        and not torch.is_grad_enabled()
        and held.shape == new.shape
        and _owners(held) == count_engines_references()
        and _is_dense(held)
        and _is_called_by_engine()
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether elements lie without gaps and overlaps, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _owners(tensor: Tensor) -> tuple[int, int]:
    """Count the references to a tensor and to its storage."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 (no public name)
    return int(tensor._use_count()), count  # type: ignore[attr-defined] # noqa: SLF001


def _is_called_by_engine() -> bool:
    """Return whether autograd's own code called, and not Python code or ``torch.func``."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 (the documented way to the stack)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    if frame is None or frame.f_code is not _ENGINE:
        return False
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FUNCTORCH):
            return False
        frame = frame.f_back
    return True


class _OwnerCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the references to the first operand of a sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners: tuple[int, int] = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.owners = _owners(args[0])
        return func(*args, **(kwargs or {}))


@cache
def count_engines_references() -> tuple[int, int]:
    """Count the references to a gradient that the engine alone holds; depends on the version."""
    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = (x * 2).exp() + (x * 3).exp()  # the gradient of x is a sum of two new tensors
        with _OwnerCounter() as counter:
            y.backward(torch.ones(2))  # type: ignore[no-untyped-call]
    owners: tuple[int, int] = counter.owners
    return owners
