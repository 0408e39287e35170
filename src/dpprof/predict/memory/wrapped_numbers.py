"""The tensors that PyTorch makes of Python numbers on a CPU.

An element-wise operator of a tensor and a number, such as ``x / 3.0``, makes a tensor of the number
(``wrapped_scalar_tensor`` in ATen/ScalarOps.h), and a copy in the dtype in which it computes
(``compute_types`` in TensorIterator.cpp). Both are there with the result, so they count where such
an operator makes the peak.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Workspace

_NAMES = (
    *("add", "sub", "mul", "div", "rsub", "floor_divide", "fmod", "remainder"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor"),
)
_aten = torch.ops.aten
WRAPPING = frozenset(
    getattr(_aten, name + end) for name in _NAMES for end in ("", "_") if hasattr(_aten, name + end)
)
"""The overload packets of such operators."""

_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}


def with_numbers(workspaces: Mapping[Any, Workspace]) -> Mapping[Any, Workspace]:
    """Return workspaces by overload packet, and of ``WRAPPING`` the tensors of numbers too."""
    return {
        **workspaces,
        **{p: _with_number(workspaces.get(p, lambda *_, **__: ())) for p in WRAPPING},
    }


def _with_number(others: Workspace) -> Workspace:
    def find(*args: Any, **kwargs: Any) -> Sequence[int]:
        return (*_wrap(*args[:2]), *others(*args, **kwargs))

    return find


def _wrap(x: Any, number: Any) -> Sequence[int]:
    """Return the bytes of a number as a tensor, and of its copy in the dtype of the result."""
    wrapped = _DTYPES.get(type(number))
    if wrapped is None or not isinstance(x, Tensor):
        return ()
    computed = torch.result_type(x, number)
    return wrapped.itemsize, 0 if computed is wrapped else computed.itemsize
