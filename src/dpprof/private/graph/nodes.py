"""Walks the autograd graph, and reads its nodes."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import _Holder

_IDENTITIES = {  # FSDP's, and that of modules with backward hooks: each output is the same input
    "RegisterPostBackwardFunctionBackward",
    "BackwardHookFunctionBackward",
}


def nodes_behind(*tensors: Tensor, until: Collection[Any] = ()) -> Iterator[Any]:
    """Visit every node behind tensors once, but no node inside of reentrant checkpointing."""
    waiting, seen = [tensor.grad_fn for tensor in tensors], set(until)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        yield node


_CUTTING = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


def outline(nodes: Sequence[Any]) -> int:
    """Return the outline of a graph: which operator uses what; other lengths have the same.

    An axis of one entry is no length: what cuts another axis into it cuts nothing.
    """
    places = {node: place for place, node in enumerate(nodes)}

    def list_edges(node: Any) -> list[Any]:
        return [(places.get(below), output) for below, output in node.next_functions]

    return hash(tuple((describe(node), *list_edges(node)) for node in nodes))


def describe(node: Any) -> str:
    """Return the name of an operator, and the axes that it has saved, or that have one entry."""
    name: str = node.name()
    if name in _CUTTING:
        return f"{name} {[size == 1 for size in shape_of(node)]}"
    axes = _axes_in(node.__class__)
    return f"{name} {[getattr(node, axis) for axis in axes]}" if axes else name


@cache
def _axes_in(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_dim")]


def kind_of(node: Any) -> str:
    """Return what a node differentiates: ``Add`` for ``AddBackward0``."""
    name: str = node.name()
    return name.rpartition("Backward")[0]


def operator_of(node: Any) -> str:
    """Return the name of an operator, for a message."""
    return kind_of(node).strip("_") or node.name().rpartition("::")[2]


def variable_of(node: Any) -> Any:
    """Return the leaf whose gradient a node accumulates; None for an operator."""
    return getattr(node, "variable", None)


def is_leaf(node: Any) -> bool:
    """Tell whether a node is that of a leaf, such as a parameter."""
    return variable_of(node) is not None


def shapes_of(node: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all that an operator returned."""
    return [_read_shape(record) for record in node._input_metadata]  # noqa: SLF001


def shape_of(node: Any, output: int = 0) -> tuple[int, ...]:
    """Return the shape of what an operator returned, or of a leaf."""
    variable = getattr(node, "variable", None)
    return _read_shape(node._input_metadata[output] if variable is None else variable)  # noqa: SLF001


def _read_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of autograd's record of it; () for a nested one."""
    is_nested = getattr(tensor, "is_nested_tensor", False) or getattr(tensor, "is_nested", False)
    return () if is_nested else tuple(tensor.shape)


def dtype_of(node: Any, output: int = 0) -> torch.dtype:
    """Return the dtype of what an operator returned, or of a leaf."""
    variable = getattr(node, "variable", None)
    dtype: torch.dtype = (node._input_metadata[output] if variable is None else variable).dtype  # noqa: SLF001
    return dtype


def edges_of(node: Any) -> list[tuple[Any, int]]:
    """Return the nodes whose outputs an operator used, and which output; past identities."""
    return [past_identities(*edge) for edge in node.next_functions]


def past_identities(node: Any, output: int) -> tuple[Any, int]:
    """Return the node that computed what a node returned, and which of its outputs that is."""
    while node is not None and node.name() in _IDENTITIES:
        node, output = node.next_functions[output]
    return node, output


def find_users(nodes: Iterable[Any]) -> dict[Any, list[tuple[Any, int]]]:
    """Return for each node those that use its output, and as which operand."""
    above: dict[Any, list[tuple[Any, int]]] = defaultdict(list)
    for node in nodes:
        if node.name() in _IDENTITIES:
            continue
        for operand, (below, _) in enumerate(edges_of(node)):
            if below is not None:
                above[below].append((node, operand))
    return above


def as_signed(number: int) -> int:
    """Return a number as it was before autograd saved it without a sign."""
    return number - 2**64 if number >= 2**63 else number


def axes_of(node: Any, count: int) -> list[int]:
    """Return which of ``count`` axes an operator has saved; all where it has none."""
    saved = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    axes = [saved] if isinstance(saved, int) else saved or range(count)
    return sorted(as_signed(axis) % count for axis in axes) if count else []


def order_of(node: Any, axes: int) -> list[int]:
    """Return which axis of its operand each axis of a transposed tensor is."""
    if hasattr(node, "_saved_dims"):
        return [as_signed(axis) % axes for axis in node._saved_dims]  # noqa: SLF001
    first, second = getattr(node, "_saved_dim0", 0), getattr(node, "_saved_dim1", axes - 1)
    first, second = as_signed(first) % axes, as_signed(second) % axes
    order = list(range(axes))
    order[first], order[second] = second, first
    return order


def is_read_once(node: Any) -> bool:
    """Tell whether a node reads what a checkpoint computes again, and hands out once."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for value in saved if isinstance(saved, tuple) else (saved,):
                if isinstance(getattr(value, "data", None), _Holder):
                    return True
    return False
