"""Takes the sizes out of a call, of its description or its arguments, and puts others in."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpprof.predict.memory.events import Launched, TensorKind, Workspace

_GAP = "#"
_NUMBER = re.compile(r"(?<=[\[ ])-?\d+(?=[,\]}])")
"""A whole number in JSON."""


def take_sizes(call: str) -> tuple[str, tuple[int, ...], list[int]]:
    """Return a description without sizes, lengths of lists of equal tensors, and whole numbers."""
    call, lengths = _fold(call)
    return _NUMBER.sub(_GAP, call), lengths, [*map(int, _NUMBER.findall(call))]


def count_numbers(call: str) -> int:
    """Return how many whole numbers a description without sizes lacks."""
    return call.count(_GAP)


def put_sizes(call: str, lengths: Sequence[int], numbers: Iterator[int]) -> str:
    """Put sizes into a description from ``take_sizes``."""
    first, *others = call.split(_GAP)
    call = first + "".join(f"{next(numbers)}{text}" for text in others)
    return _unfold(call, lengths) if lengths else call


def _fold(call: str) -> tuple[str, tuple[int, ...]]:
    """Shorten each list of equal tensors in the description of a call to one, and count them."""
    # A list of tensors is the first argument, or follows another one.
    if '[[{"t"' not in call and ', [{"t"' not in call.partition("[{")[2]:
        return call, ()
    name, arguments, named = json.loads(call)
    lengths = []
    for index, value in enumerate(arguments):
        is_list = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_list and all(item == value[0] for item in value):
            arguments[index] = {"each": value[0]}
            lengths.append(len(value))
    return json.dumps([name, arguments, named]), tuple(lengths)


def _unfold(call: str, lengths: Sequence[int]) -> str:
    name, arguments, named = json.loads(call)
    waiting = iter(lengths)
    for index, value in enumerate(arguments):
        if isinstance(value, dict) and "each" in value:
            arguments[index] = [value["each"]] * next(waiting)
    return json.dumps([name, arguments, named])


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
