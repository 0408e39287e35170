"""Finds from the graph which sample each element of a tensor belongs to.

The losses are the samples' own. From there each operator with a rule shows whose its operands are
(``owner_rules``). Where that stops, at an operator without a rule, tensors with one entry for each
loss count as one entry for each sample; below such an operator the proof goes on from those. All
that follows from them, or leaves out a user without a rule, is ``trusted``: such an operator may
put samples into an order that depends on data, so what was verified of one batch says nothing of
the next. An autograd function of the user's own is taken to keep the order that it had.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction

from dpprof.private.graph.nodes import edges_of, is_leaf, shape_of, shapes_of, variable_of
from dpprof.private.graph.operands import Operand
from dpprof.private.graph.owner_rules import joins_samples, owners_above, owners_below
from dpprof.private.graph.owners import (
    FREE,
    MANY,
    Owners,
    Shape,
    along_first_axis,
    is_complete,
    join,
    merge,
    of_first_axis,
)
from dpprof.private.graph.rows import Rows

Output = tuple[Any, int]  # a node, and which of its outputs
_COMPILED = "CompiledFunctionBackward"


class Proof:
    """The owners of what the operators behind the losses of one batch returned.

    ``losses`` is an operator's output; what it returned has one element for each of ``samples``.
    ``users`` are those of each node's output; ``reads`` tells whether an index may be read.
    """

    def __init__(
        self,
        losses: Output,
        samples: int,
        users: Mapping[Any, list[tuple[Any, int]]],
        *,
        reads: bool,
    ) -> None:
        self._losses, self._samples, self._reads = losses, samples, reads
        self.has_read = False  # whether it rests on the values of an index
        self.has_orders = False  # whether an operator may have changed the order of samples
        self.owners: dict[Output, Owners] = {}
        self.stops: dict[Output, Any] = {}  # the operators at which the proof stopped
        self.mixes: dict[Output, Any] = {}  # operators that join, exchange or leave out samples
        self._unsure: set[Output] = set()  # what goes into an operator of which nothing is known
        self.trusted: set[Output] = set()  # what has owners by its length, or by some users alone
        order = self._sort(users)
        self._go_down(order)
        # Above an operator without a rule owners may follow from those below it. They may show
        # more operands, so both ways are gone until nothing is new.
        while self._go_up(order):
            self._go_down(order)

    def is_shared(self, leaf: Any) -> bool:
        """Tell whether losses of several samples depend on an element of a leaf, if known."""
        uses = self._uses.get((leaf, 0))
        return uses is not None and bool((merge(uses) == MANY).any())

    def _sort(self, users: Mapping[Any, list[tuple[Any, int]]]) -> list[Any]:
        """List the nodes, each after those that use its outputs."""
        waits = {node: len(above) for node, above in users.items()}
        order, ready = [], [self._losses[0]]
        while ready:
            node = ready.pop()
            order.append(node)
            for below, _ in edges_of(node):
                if below is not None:
                    waits[below] -= 1
                    if not waits[below]:
                        ready.append(below)
        return [node for node in order if not is_leaf(node)]

    def _go_down(self, order: Sequence[Any]) -> None:
        """Find the owners of operands by those of what operators returned."""
        self._uses = uses = dict[Output, list[Owners]]()
        uses[self._losses] = [np.arange(self._samples, dtype=np.int32)]
        self.stops.clear()
        self.mixes.clear()
        for node in order:
            returned = {
                (node, output): self._find_owners((node, output), shape, uses)
                for output, shape in enumerate(shapes_of(node))
            }
            above = [parts for parts in returned.values() if parts is not None]
            stops = [self.stops.get(key, node) for key, parts in returned.items() if parts is None]
            mix = next((self.mixes[key] for key in returned if key in self.mixes), node)
            for position, below in enumerate(edges_of(node)):
                if below[0] is None or isinstance(variable_of(below[0]), nn.Parameter):
                    continue
                operand = Operand(node, position, shape_of(*below), above, self._read)
                # Nothing is known of operands while the owners of one output are not.
                below_owners = None if stops else self._find_below(operand)
                if below_owners is None:
                    self.stops.setdefault(below, stops[0] if stops else node)
                    if stops or not _keeps_order(node, operand.shape):
                        self._unsure.add(below)
                    continue
                uses.setdefault(below, []).append(below_owners)
                if any(key in self.trusted for key in returned):
                    self.trusted.add(below)
                if (below_owners == MANY).any():
                    self.mixes.setdefault(below, mix)

    def _find_owners(
        self, key: Output, shape: Shape, uses: Mapping[Output, list[Owners]]
    ) -> Owners | None:
        """Return the owners of what an operator returned, once all that use it were looked at."""
        if key in self.owners:
            return self.owners[key]
        merged: Owners | None = None
        if key in uses:
            merged = merge(uses[key])
            # An unknown user may need what is free for the others.
            if key in self.stops and (merged == FREE).any():
                merged = _complete(merged)
        elif key not in self.stops:
            merged = np.full((1,) * len(shape), FREE, np.int32)
        if merged is None and shape[:1] == (self._samples,) and not _is_of_a_leaf(key[0]):
            merged = of_first_axis(np.arange(self._samples, dtype=np.int32), len(shape))
        if merged is not None:
            self.owners[key] = merged
            if key in self._unsure:
                self.trusted.add(key)
        return merged

    def _find_below(self, operand: Operand) -> Owners | None:
        node = operand.node
        if isinstance(node, BackwardCFunction):
            return self._pass_layer(node, operand.above, shapes_of(node)[0], operand.shape)
        below = owners_below(operand)
        self.has_orders |= below is not None and joins_samples(operand, below)
        return below

    def _go_up(self, order: Sequence[Any]) -> bool:
        """Find owners of what operators returned by those of operands; tell whether any is new."""
        has_found = False
        for node in reversed(order):
            for output, after in enumerate(shapes_of(node)):
                if (node, output) in self.owners:
                    continue
                for position, below in enumerate(edges_of(node)):
                    complete = _complete(self.owners.get(below))
                    if complete is None:
                        continue
                    before = shape_of(*below)
                    if isinstance(node, BackwardCFunction):
                        above = self._pass_layer(node, [complete], before, after)
                    else:
                        above = owners_above(node, position, complete, (before, after))
                    if above is not None:
                        self.owners[node, output] = above
                        self.trusted.add((node, output))
                        has_found = True
                        break
        return has_found

    def _pass_layer(
        self, node: Any, sides: Sequence[Owners], shape: Shape, other: Shape
    ) -> Owners | None:
        """Return the owners on the other side of a layer, which treats each row, or token, apart.

        A layer without a rule treats the rows of a sample apart from others', and may have more.
        """
        if not hasattr(node, "clipped") or not other:
            return None
        widths = getattr(node, "widths", 0)
        if widths and shape[:-widths] == other[:-widths]:
            return join(sides[0], range(len(shape) - widths, len(shape)))
        along = [along_first_axis(side) for side in sides if side.size > 1 or (side != FREE).any()]
        parts = [side for side in along if side is not None]
        if len(parts) < len(along) or not shape:
            return None
        owners = merge(parts) if parts else np.full(1, FREE, np.int32)
        if len(owners) == 1 or shape[0] == other[0]:
            return of_first_axis(owners, len(other))
        rows = Rows.of(owners, self._samples) if hasattr(node, "samples") else None
        if rows is None or not rows.each or other[0] % self._samples:
            return None
        in_order = np.arange(self._samples, dtype=np.int32).repeat(other[0] // self._samples)
        return of_first_axis(in_order, len(other))

    def _read(self, index: Tensor) -> Any:
        """Return the values of an index, None where they are not known."""
        if not self._reads or isinstance(index, FakeTensor):
            return None
        self.has_read = True
        return index.detach().cpu().numpy()


def _keeps_order(node: Any, shape: Shape) -> bool:
    """Tell whether a node is an autograd function, of somebody's own, that keeps a first axis.

    It is taken to keep the order there too, unless a compiler made it of any code.
    """
    is_own = node.name() != _COMPILED and isinstance(node, BackwardCFunction)
    return is_own and all(returned[:1] == shape[:1] for returned in shapes_of(node))


def _is_of_a_leaf(node: Any) -> bool:
    """Tell whether only operators of one operand are between a leaf and a node."""
    while node is not None and len(below := edges_of(node)) == 1:
        node = below[0][0]
    return node is not None and is_leaf(node)


def _complete(owners: Owners | None) -> Owners | None:
    """Give the free entries of each row the owner of its others; None where a row has none."""
    if owners is None or is_complete(owners):
        return owners
    along = along_first_axis(owners)
    if along is None or not is_complete(along):
        return None
    return of_first_axis(along, owners.ndim)
