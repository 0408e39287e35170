"""Proves from the graph that a first axis holds one sample's entries after the other's.

Many models join samples and tokens before a layer, ``x.view(-1, d)``, or cut images into windows.
Then the first axis has k entries of each sample. Its length alone proves nothing: tokens that
were gathered for an expert may be as many. What proves it is a path of operators, to a tensor
with one entry for each loss, that all keep entries in the order of their samples: those that
reshape, those that treat each entry of the first axis apart, and layers. The end of that path is
known by its length alone, and code around layers must keep samples apart; so the first batch whose
graph has these operators is verified (``first_batch``), and again wherever the graph changes.

Shape legend: B samples, k entries of each, T tokens, d width.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dpprof.clipping.batch_axis import receive_turned
from dpprof.clipping.contributions import (
    ChunkedProduct,
    Contribution,
    Convolution,
    SampleGradients,
)
from dpprof.clipping.layers import Contributions, Receive

_RESHAPING = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"}
"""Operators that leave all elements in their order, by the names of their nodes."""

_BY_ENTRY = {
    *("Abs", "Add", "Alias", "Bmm", "Clamp", "Clone", "Div", "Exp", "Expand", "Gelu"),
    *("LogSoftmax", "MaskedFill", "Mul", "NativeDropout", "NativeGroupNorm", "NativeLayerNorm"),
    *("Neg", "Pow", "Relu", "Sigmoid", "Silu", "Slice", "Softmax", "Softplus", "Split"),
    *("SplitWithSizes", "Sqrt", "Sub", "Tanh", "ToCopy", "Where"),
    *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention"),
    *("ScaledDotProductEfficientAttention", "ScaledDotProductCudnnAttention"),
}
"""Operators that treat each entry of the first axis apart, where its length stays the same."""

_IDENTITY = "RegisterPostBackwardFunctionBackward"
"""The node by which FSDP notices that backward has passed a module: it returns what it gets."""

_ROWS_OF = {"Mm": 0, "Addmm": 1}
"""Which operand of a product of matrices has the rows of its output."""


def kind_of(node: Any) -> str:
    """Return what a node differentiates: ``Add`` for ``AddBackward0``."""
    name: str = node.name()
    return name.partition("Backward")[0]


def shape_of(node: Any, output: int = 0) -> tuple[int, ...]:
    """Return the shape of what an operator returned, or of a leaf."""
    variable = getattr(node, "variable", None)
    return tuple(
        node._input_metadata[output].shape if variable is None else variable.shape  # noqa: SLF001
    )


def dtype_of(node: Any, output: int = 0) -> torch.dtype:
    """Return the dtype of what an operator returned, or of a leaf."""
    variable = getattr(node, "variable", None)
    dtype: torch.dtype = (node._input_metadata[output] if variable is None else variable).dtype  # noqa: SLF001
    return dtype


def edges_of(node: Any) -> list[tuple[Any, int]]:
    """Return the nodes whose outputs an operator used, and which output; past FSDP's identities."""
    found: list[tuple[Any, int]] = []
    for below, output in node.next_functions:
        while below is not None and below.name() == _IDENTITY:
            below, output = below.next_functions[output]  # noqa: PLW2901
        found.append((below, output))
    return found


def find_users(nodes: Iterable[Any]) -> dict[Any, list[tuple[Any, int]]]:
    """Return for each node those that use its output, and as which operand."""
    above: dict[Any, list[tuple[Any, int]]] = defaultdict(list)
    for node in nodes:
        if node.name() == _IDENTITY:
            continue
        for operand, (below, _) in enumerate(edges_of(node)):
            if below is not None:
                above[below].append((node, operand))
    return above


class SampleMajor:
    """Tells where samples come first in one batch.

    Args:
        nodes: Those behind the losses.
        samples: How many losses there are.
    """

    def __init__(self, nodes: Sequence[Any], samples: int) -> None:
        self._nodes, self._samples = nodes, samples
        self._above: Mapping[Any, list[tuple[Any, int]]] | None = None
        self._found: dict[Any, bool] = {}
        self._receivers: list[tuple[Any, Receive]] = []

    @property
    def above(self) -> Mapping[Any, list[tuple[Any, int]]]:
        """For each node those that use its output, and as which operand."""
        if self._above is None:
            self._above = find_users(self._nodes)
        return self._above

    def holds(self, node: Any) -> bool:
        """Tell whether the first axis of what a node returned has entries of each sample."""
        first = shape_of(node)[:1]
        if not self._samples or not first or first[0] % self._samples:
            return False
        if first[0] == self._samples or self._samples == 1:
            return True
        if node not in self._found:
            self._search(node)
        return self._found[node]

    def _search(self, start: Any) -> None:
        """Walk from a node along operators that keep the order, until samples come first."""
        waiting, seen, is_proven = [start], {start}, False
        while waiting:
            node = waiting.pop()
            shape = shape_of(node)
            if shape[:1] == (self._samples,):
                is_proven |= not _is_of_a_leaf(node)
                continue
            below = [(one, node, at) for at, (one, _) in enumerate(edges_of(node))]
            above = [(user, user, at) for user, at in self.above.get(node, ())]
            for next_node, user, operand in (*below, *above):
                if next_node not in seen and next_node is not None and self._keeps(user, operand):
                    seen.add(next_node)
                    waiting.append(next_node)
        self._found.update(dict.fromkeys(seen, is_proven))

    def _keeps(self, user: Any, operand: int) -> bool:
        """Tell whether an operator keeps its operand's entries in the order of samples."""
        below, output = edges_of(user)[operand]
        before, after = shape_of(below, output), shape_of(user)
        if not before or not after or before[0] % self._samples or after[0] % self._samples:
            return False
        kind = kind_of(user)
        if kind in _RESHAPING:
            return True
        if isinstance(user, BackwardCFunction):
            is_alike = before[0] == after[0] or hasattr(user, "samples")
            return is_alike and hasattr(user, "clipped") and not hasattr(below, "variable")
        return before[0] == after[0] and _treats_entries_apart(user, kind, operand, len(before))

    def group(self) -> None:
        """Let layers with k entries of each sample contribute gradients of samples."""
        for node in self._nodes if self._samples else ():
            if not isinstance(node, BackwardCFunction) or not hasattr(node, "receive"):
                continue
            if hasattr(node, "samples"):  # a layer without a rule
                node.samples = self._samples if self.holds(node) else 0
            elif (
                hasattr(node, "shared")
                or shape_of(node)[:1] == (self._samples,)
                or getattr(node.receive, "func", None) is receive_turned
            ):
                continue
            elif self.holds(node):
                self._receivers.append((node, node.receive))
                node.receive = partial(_receive_grouped, node.receive, self._samples)

    def describe(self) -> set[str]:
        """Tell by which operators this batch was proven to be in order; nothing if none was asked.

        Lengths are not in it: the same code on another batch is described alike.
        """
        if not self._found:
            return set()
        names = Counter(
            (node.name(), *(below.name() for below, _ in node.next_functions if below is not None))
            for node in self._nodes
        )
        return {f"samples first, in graph {hash(frozenset(names.items()))}"}

    def remove(self) -> None:
        """Change no more backward passes."""
        for node, receive in self._receivers:
            node.receive = receive
        self._receivers.clear()


def _treats_entries_apart(user: Any, kind: str, operand: int, axes: int) -> bool:
    """Tell whether an operator does, which leaves the first axis as long as its operand's."""
    if kind in _ROWS_OF:
        return operand == _ROWS_OF[kind]
    if kind == "Permute":
        return user._saved_dims[0] in (0, -axes)  # noqa: SLF001 (no public name)
    if kind == "Transpose":
        swapped = (user._saved_dim0, user._saved_dim1)  # noqa: SLF001
        return all(_as_signed(at) % axes for at in swapped)
    return kind in _BY_ENTRY and len(shape_of(user)) == axes


def _as_signed(axis: int) -> int:
    return axis - 2**64 if axis >= 2**63 else axis


def _is_of_a_leaf(node: Any) -> bool:
    """Tell whether only operators of one operand are between a leaf and a node."""
    while node is not None and len(below := edges_of(node)) == 1:
        node = below[0][0]
    return hasattr(node, "variable")


def _receive_grouped(
    receive: Receive, samples: int, contributions: Contributions, changed_B: Tensor | None = None
) -> None:
    receive([(p, group_entries(one, samples)) for p, one in contributions], changed_B)


def group_entries(contribution: Contribution, samples: int) -> Contribution:
    """Turn what entries contribute, k for each sample, into what samples contribute.

    Their tokens are those of all entries. A head's contribution that is computed in chunks stays
    as it is, and is refused where its norm is taken.
    """
    if isinstance(contribution, ChunkedProduct):
        return contribution
    if isinstance(contribution, Convolution):
        contribution = SampleGradients(contribution.materialise(*contribution))
    if isinstance(contribution, SampleGradients):
        return SampleGradients(torch.unflatten(contribution.gradients, 0, (samples, -1)).sum(1))
    joined: dict[str, Any] = {
        name: part.reshape(samples, -1, *part.shape[2:])
        for name, part in contribution._asdict().items()
        if isinstance(part, Tensor)
    }
    return contribution._replace(**joined)
