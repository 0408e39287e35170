"""Splits batches of any structure by samples: nested, of objects, with strings beside tensors.

A batch is a tree of mappings, lists, tuples, dataclasses and objects. A leaf that has one entry for
each sample on its first axis is split; every other leaf belongs to all samples, and stays whole.

Shape legend: B samples.
"""

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

Split = Callable[[Any], Any]

_MOVED = (Tensor, PackedSequence)

_LEAVES = (str, bytes, int, float, complex, type, Tensor, nn.Module)
"""Classes of values that are no structures."""


def take(batch: Any, samples: int, places: Sequence[int], whole: Any = None) -> Any:
    """Return the batch of some of its samples, in this order; a sample may come again.

    It may have any structure, and a leaf, ``whole``, stays as it is. ``ValueError``: a list
    could be one of samples or one of tensors; the message names its path.
    """
    return apply(
        batch, samples, lambda leaf: leaf if leaf is whole else _take_of_leaf(leaf, places)
    )


def apply(batch: Any, samples: int, function: Split, path: str = "batch") -> Any:
    """Return the batch with a function applied to each leaf that has one entry for each sample.

    Such a leaf is a tensor, an array, a ``PackedSequence``, or a list or tuple of samples.
    ``ValueError``: as of ``take``.
    """
    return _change(batch, lambda part, path: _is_split(part, samples, path), function, path)


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on a device."""
    return _change(batch, lambda leaf, _: isinstance(leaf, _MOVED), lambda leaf: leaf.to(device))


def _change(
    batch: Any, is_leaf: Callable[[Any, str], bool], function: Split, path: str = "batch"
) -> Any:
    if is_leaf(batch, path):
        return function(batch)
    parts = _parts_of(batch)
    others = {
        key: _change(part, is_leaf, function, f"{path}{_write(batch, key)}")
        for key, part in parts.items()
    }
    if all(others[key] is part for key, part in parts.items()):
        return batch
    return _rebuild(batch, others)


def find_split(batch: Any, samples: int, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """List the leaves that have an entry for each sample, with their paths."""
    if _is_split(batch, samples, path):
        yield path, batch
        return
    for key, part in _parts_of(batch).items():
        yield from find_split(part, samples, f"{path}{_write(batch, key)}")


def find_whole(batch: Any, samples: int, path: str = "batch") -> Iterator[str]:
    """Name the tensors that belong to all samples, but for single numbers."""
    if _is_split(batch, samples, path):
        return
    if isinstance(batch, Tensor) and batch.dim():
        yield path
    for key, part in _parts_of(batch).items():
        yield from find_whole(part, samples, f"{path}{_write(batch, key)}")


def find_sizes(batch: Any) -> Iterator[int]:
    """List the number of entries of each leaf that may have one for each sample."""
    if isinstance(batch, PackedSequence):
        yield int(batch.batch_sizes[0])
    elif _is_array(batch):
        yield len(batch)
    else:
        sizes = [size for part in _parts_of(batch).values() for size in find_sizes(part)]
        if _is_list(batch) and (len(set(sizes)) != 1 or _has_records(batch)):
            yield len(batch)
        yield from sizes


def give(
    function: Callable[..., Any], batch: Any, *before: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the arguments with which a loop would call a function, after ``before``.

    A mapping becomes arguments by name, a list or tuple arguments by position, where the function
    takes them so; anything else is one argument. ``TypeError``: it takes the batch in neither way.
    """
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(batch))
    elif isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        arguments = (tuple(batch), {})
    else:
        return (batch,), {}
    inputs, named = arguments
    if may_call(function, *before, *inputs, **named):
        return arguments
    if not may_call(function, *before, batch):
        parts = ", ".join(named) or str(len(inputs))
        raise TypeError(
            f"the function of the losses takes {inspect.signature(function)}, and is called with "
            f"{'the model and ' * bool(before)}the parts of a batch ({parts}), or all in one"
        )
    return (batch,), {}


def may_call(function: Callable[..., Any], *inputs: Any, **named: Any) -> bool:
    """Tell whether a function takes these arguments, as far as its signature says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions in C have none
        return True
    try:
        signature.bind(*inputs, **named)
    except TypeError:
        return False
    return True


def _is_array(leaf: Any) -> bool:
    """Tell whether a leaf is a tensor or an array with a first axis."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0
    return hasattr(type(leaf), "__array__") and bool(getattr(leaf, "shape", ()))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _has_records(value: Any) -> bool:
    """Tell whether a list has mappings or objects, which count as samples."""
    return any(_parts_of(entry) and not isinstance(entry, list | tuple) for entry in value)


def _is_split(value: Any, samples: int, path: str) -> bool:
    """Tell whether a leaf has an entry for each sample; ``ValueError`` if that is ambiguous."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]) == samples
    if _is_array(value):
        return len(value) == samples
    if not _is_list(value) or len(value) != samples or path == "batch":
        return False
    fits = [size == samples for entry in value for size in find_sizes(entry)]
    kinds = {(type(entry), *_parts_of(entry)) for entry in value}  # samples have the same parts
    if not any(fits) or (_has_records(value) and not (all(fits) and len(kinds) > 1)):
        return True
    raise ValueError(
        f"{path} has {samples} entries that are as long as the batch of {samples} samples, and may "
        "be samples or parts of samples; give a batch of another size, parts by name, or samples "
        "as dictionaries"
    )


def _parts_of(value: Any) -> dict[Any, Any]:
    """Return what a structure or an object has, by key; nothing of a leaf."""
    if isinstance(value, dict | UserDict | MappingProxyType):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if value is None or isinstance(value, _LEAVES) or callable(value):
        return {}
    if type(value).__module__ in ("builtins", "numpy"):
        return {}
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own | getattr(value, "__dict__", {})


def _rebuild(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a structure or an object that has other parts."""
    if isinstance(value, list | tuple):
        if hasattr(value, "_fields"):
            return type(value)(*parts.values())
        return type(value)(parts.values())
    if isinstance(value, MappingProxyType):
        return MappingProxyType(parts)
    if isinstance(value, dict | UserDict):
        filled = copy.copy(value)
        filled.update(parts)
        return filled
    other = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(other, name, part)  # also of what is frozen
    return other


def _write(value: Any, key: Any) -> str:
    is_object = not isinstance(value, Mapping | list | tuple)
    return f".{key}" if is_object else f"[{key!r}]"


def _take_of_leaf(leaf: Any, places: Sequence[int]) -> Any:
    if isinstance(leaf, Tensor):  # also a sparse one
        return leaf.index_select(0, torch.tensor(places, dtype=torch.long, device=leaf.device))
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        rows = torch.tensor(places, dtype=torch.long)
        return pack_padded_sequence(
            padded[rows.to(padded.device)],
            lengths[rows],
            batch_first=True,
            enforce_sorted=False,
        )
    if isinstance(leaf, list | tuple):
        return type(leaf)([leaf[place] for place in places])
    return leaf[list(places)]
