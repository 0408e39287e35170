"""A call of an operator, described so that another process can make it again on other elements.

A description is JSON text: equal text means that the operator gets tensors of the same shapes,
strides and dtypes and the same other arguments, so that it takes the same time. Devices are left
out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.subjects.models.quantized import import_bitsandbytes

_PLAIN = (bool, int, float, str, type(None))
_LEFT_OUT = ("device", "generator", "pin_memory")


class Layout(NamedTuple):
    """The properties of a tensor that an operator's time depends on."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype
    bound: int  # integer elements stay below this, because they are positions in another tensor


def describe_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe a call of an operator's overload."""
    named = {name: _describe(value) for name, value in kwargs.items() if name not in _LEFT_OUT}
    return json.dumps([str(func), [_describe(value) for value in args], named])


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"t": [list(value.shape), list(value.stride()), dtype]}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return {"torch": str(value).removeprefix("torch.")}
    return int(value) if isinstance(value, torch.SymInt) else None


_BOUNDS: Mapping[str, Callable[[list[Any]], int]] = {
    "embedding": lambda args: args[0]["t"][0][0],
    "embedding_dense_backward": lambda args: args[2],
    "nll_loss_forward": lambda args: args[0]["t"][0][-1],
    "nll_loss_backward": lambda args: args[1]["t"][0][-1],
    **dict.fromkeys(
        ("gather", "index_select", "index_add", "index_add_", "scatter", "scatter_add_"),
        lambda args: args[0]["t"][0][args[1]],
    ),
}
"""The exclusive upper bound of integer elements in an operator's arguments, by operator."""


def read_call(
    call: str, make: Callable[[Layout], Tensor], device: torch.device
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the operator of a description, and arguments to call it with.

    ``make`` makes a tensor of a layout; ``device`` is for operators that make a tensor from none.

    Raises:
        AttributeError: This PyTorch has no such operator.
    """
    name, args, kwargs = json.loads(call)
    if name.startswith("bitsandbytes."):
        import_bitsandbytes()  # which defines it
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part)
    find_bound = _BOUNDS.get(name.split(".")[1])
    bound = find_bound(args) if find_bound else 1

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "torch" in value:
            return getattr(torch, value["torch"])
        shape, strides, dtype = value["t"]
        return make(Layout(shape, strides, getattr(torch, dtype), bound))

    named = {key: build(value) for key, value in kwargs.items()}
    if any(argument.name == "device" for argument in operator._schema.arguments):  # noqa: SLF001
        named["device"] = device
    return operator, build(args), named
