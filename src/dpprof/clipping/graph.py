"""Walks the autograd graph."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(*tensors: Tensor, until: Collection[Any] = ()) -> Iterator[Any]:
    """Visit every node of the graph behind tensors once, as far as some nodes.

    Nodes inside of reentrant checkpointing are not visited.
    """
    waiting, seen = [tensor.grad_fn for tensor in tensors], set(until)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        yield node
