"""Walks the autograd graph."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensor: Tensor) -> Iterator[Any]:
    """Visit every node of the graph behind a tensor once.

    Nodes inside of reentrant checkpointing are not visited.
    """
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        yield node
