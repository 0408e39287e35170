"""Finds the tensors in any value."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from tensors_in(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from tensors_in(branch)
