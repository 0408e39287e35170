"""Arguments of kernels that allocate memory of their own: without sizes, and with others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Launched, TensorKind, Workspace


def describe_arguments(value: Any, sizes: list[int]) -> Any:
    """Return arguments that can be compared; sizes of tensors, and numbers, go into a list."""
    if isinstance(value, Tensor):
        sizes += (*value.shape, *value.stride())
        return TensorKind(value.dtype, value.dim())
    if type(value) is int:
        sizes.append(value)
        return int
    if isinstance(value, list | tuple):
        return tuple(describe_arguments(item, sizes) for item in value)
    if isinstance(value, dict):
        return tuple((key, describe_arguments(item, sizes)) for key, item in value.items())
    return value


def find_workspaces(
    launched: Launched, sizes: Sequence[int], workspaces: Mapping[Any, Workspace]
) -> list[int]:
    """Return what a kernel allocates if its tensors have these shapes and strides."""
    waiting = iter(sizes)

    def make(value: Any) -> Any:
        if isinstance(value, TensorKind):
            shape, strides = ([next(waiting) for _ in range(value.dimensions)] for _ in range(2))
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        if value is int:
            return next(waiting)
        return [make(item) for item in value] if isinstance(value, tuple) else value

    args, kwargs = launched.arguments
    positional = [make(value) for value in args]  # before the others, as their sizes come first
    named = {name: make(value) for name, value in kwargs}
    return [*filter(None, workspaces[launched.packet](*positional, **named))]
