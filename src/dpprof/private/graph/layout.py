"""Proves from the graph which sample each row of a layer belongs to.

Many models join samples and tokens before a layer, ``x.view(-1, d)``, cut images into windows, or
give a layer several rows of each sample: pairs, augmentations, negatives. Then the first axis has
more entries than there are losses. Its length alone proves nothing: tokens that were gathered for
an expert may be as many. The graph proves it: from the losses on, each known operator shows whose
its operands are (``owner_rules``). Where that stops, tensors with one entry for each loss count as
one entry for each sample. Code around layers must keep samples apart; so the first batch whose
graph has these operators is verified (``first_batch``), and again wherever the graph changes.

Shape legend: B samples, R rows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction

from dpprof.private.contributions.contributions import Contributions, Receive, receive_turned
from dpprof.private.contributions.sample_norms import BatchAxisError
from dpprof.private.graph.nodes import (
    edges_of,
    find_users,
    is_leaf,
    nodes_behind,
    operator_of,
    past_identities,
    shape_of,
    shapes_of,
)
from dpprof.private.graph.owner_rules import Operand, joins_samples, owners_above, owners_below
from dpprof.private.graph.owners import (
    FREE,
    MANY,
    Owners,
    along_first_axis,
    is_complete,
    join,
    merge,
    of_first_axis,
    whole,
)
from dpprof.private.graph.rows import Rows

_IN_PLACE = {"AsStrided", "CopySlices"}
"""What changes of views in place leave in a graph."""

_Output = tuple[Any, int]
"""A node, and which of its outputs."""


class Layout:
    """Tells which rows samples have in one batch.

    Args:
        losses: (B,); None for no batch.
        name_of: Names a parameter.
        proves: Whether tensors with one entry for each loss are looked at too.
        reads: Whether an index may be read; where a graph is captured, others will be there later.
    """

    def __init__(
        self,
        losses: Tensor | None = None,
        name_of: Callable[[nn.Parameter], str] = str,
        *,
        proves: bool = False,
        reads: bool = True,
    ) -> None:
        self.samples = 0 if losses is None else len(losses)
        self.nodes = [] if losses is None else list(nodes_behind(losses))
        """The nodes behind the losses."""

        start = (None, 0) if losses is None else (losses.grad_fn, losses.output_nr)
        self._start: _Output = past_identities(*start)
        self._name_of, self._proves, self._reads = name_of, proves, reads
        self._has_read = False
        self._above: Mapping[Any, list[tuple[Any, int]]] | None = None
        self._owners: dict[_Output, Owners] | None = None
        self._stops: dict[_Output, Any] = {}
        """The operators at which the proof stopped."""

        self._mixes: dict[_Output, Any] = {}
        """The operators that join, exchange or leave out what the losses of several samples use."""

        self._rows: dict[tuple[Any, int], Rows | None] = {}
        self._receivers: list[tuple[Any, Receive]] = []
        self.problem: BatchAxisError | None = None
        """The first layer that contributed, and of which nothing is proven."""

        self.raises = False
        """Whether such a layer is refused at once, and not only noted."""

        self.has_orders = False
        """Whether rows have orders that lengths do not tell; then all of the graph is looked at."""

    @property
    def above(self) -> Mapping[Any, list[tuple[Any, int]]]:
        """The users of each node's output, and as which operand they use it."""
        if self._above is None:
            self._above = find_users(self.nodes)
        return self._above

    def rows_of(self, node: Any, axis: int = 0) -> Rows | None:
        """Return which rows of what a node returned samples have; None where nothing proves it.

        Args:
            node: An operator.
            axis: The axis of rows.
        """
        count = shape_of(node)[axis : axis + 1]
        if not self.samples or not count:
            return None
        if self.samples == 1 or (count[0] == self.samples and not self._proves):
            return Rows.in_order(self.samples, count[0])
        if (node, axis) not in self._rows:
            self._rows[node, axis] = self._find_rows(node, axis, count[0])
        return self._rows[node, axis]

    def _find_rows(self, node: Any, axis: int, count: int) -> Rows | None:
        """Return the rows of samples by the graph, which is followed at the first call."""
        if self._owners is None:
            self._owners = {}
            self._prove(self._owners)
        along = self._owners_along(node, axis)
        if along is None or (along == MANY).any():
            # Samples may lie on another axis, or code mixes them: the first batch shows it.
            return Rows.in_order(count, count) if count == self.samples else None
        rows = Rows.of(whole(along, 0, count), self.samples)
        # What an index picks may depend on data: as many rows of each sample do not.
        is_fixed = rows is None or rows.is_in_blocks or (self._reads and not self._has_read)
        return rows if is_fixed else None

    def _owners_along(self, node: Any, axis: int) -> Owners | None:
        """Return the owners of the rows of all that a node returned; None if they are unknown."""
        count = shape_of(node)[axis]
        along = []
        for output, shape in enumerate(shapes_of(node)):
            owners = (self._owners or {}).get((node, output))
            if shape[axis : axis + 1] == (count,) and owners is not None:
                along.append(along_first_axis(np.moveaxis(owners, axis, 0)))
        rows = [owners_R for owners_R in along if owners_R is not None]
        return merge(rows) if rows and len(rows) == len(along) else None

    def _prove(self, owners: dict[_Output, Owners]) -> None:
        """Find owners from the losses downwards, and upwards again past unknown operators."""
        order = self._sort()
        self._go_down(order, owners)
        while self._go_up(order, owners):
            self._go_down(order, owners)

    def _sort(self) -> list[Any]:
        """List the nodes, each after those that use its outputs."""
        waits = {node: len(users) for node, users in self.above.items()}
        order, ready = [], [self._start[0]]
        while ready:
            node = ready.pop()
            order.append(node)
            for below, _ in edges_of(node):
                if below is not None:
                    waits[below] -= 1
                    if not waits[below]:
                        ready.append(below)
        return [node for node in order if not is_leaf(node)]

    def _go_down(self, order: Sequence[Any], owners: dict[_Output, Owners]) -> None:
        """Find the owners of operands by those of what operators returned."""
        uses: dict[_Output, list[Owners]] = {}
        uses[self._start] = [np.arange(self.samples, dtype=np.int32)]
        self._stops.clear()
        self._mixes.clear()
        for node in order:
            returned = {
                (node, output): self._find_owners((node, output), shape, uses, owners)
                for output, shape in enumerate(shapes_of(node))
            }
            above = [parts for parts in returned.values() if parts is not None]
            stops = [self._stops.get(key, node) for key, parts in returned.items() if parts is None]
            mix = next((self._mixes[key] for key in returned if key in self._mixes), node)
            for position, below in enumerate(edges_of(node)):
                if below[0] is None or is_leaf(below[0]):
                    continue
                operand = Operand(node, position, shape_of(*below), above, self._read)
                below_owners = None if stops else self._find_below(operand)
                if below_owners is None:
                    self._stops.setdefault(below, stops[0] if stops else node)
                    continue
                uses.setdefault(below, []).append(below_owners)
                if (below_owners == MANY).any():
                    self._mixes.setdefault(below, mix)

    def _find_owners(
        self,
        key: _Output,
        shape: tuple[int, ...],
        uses: Mapping[_Output, list[Owners]],
        owners: dict[_Output, Owners],
    ) -> Owners | None:
        """Return the owners of what an operator returned, once all that use it are known."""
        if key in owners:
            return owners[key]
        merged: Owners | None = None
        if key in uses:
            merged = merge(uses[key])
            if key in self._stops and (merged == FREE).any():
                merged = _complete(merged)
        elif key not in self._stops:
            merged = np.full((1,) * len(shape), FREE, np.int32)
        if merged is None and shape[:1] == (self.samples,) and not _is_of_a_leaf(key[0]):
            merged = of_first_axis(np.arange(self.samples, dtype=np.int32), len(shape))
        if merged is not None:
            owners[key] = merged
        return merged

    def _find_below(self, operand: Operand) -> Owners | None:
        node = operand.node
        if isinstance(node, BackwardCFunction):
            return self._pass_layer(node, operand.above, shapes_of(node)[0], operand.shape)
        below = owners_below(operand)
        if below is not None and joins_samples(operand, below):
            self.has_orders = True
        return below

    def _go_up(self, order: Sequence[Any], owners: dict[_Output, Owners]) -> bool:
        """Find owners of what operators returned by those of operands; tell whether any is new."""
        has_found = False
        for node in reversed(order):
            for output, after in enumerate(shapes_of(node)):
                if (node, output) in owners:
                    continue
                for position, below in enumerate(edges_of(node)):
                    complete = _complete(owners.get(below))
                    if complete is None:
                        continue
                    before = shape_of(*below)
                    if isinstance(node, BackwardCFunction):
                        output_owners = self._pass_layer(node, [complete], before, after)
                    else:
                        output_owners = owners_above(node, position, complete, (before, after))
                    if output_owners is not None:
                        owners[node, output] = output_owners
                        has_found = True
                        break
        return has_found

    def _pass_layer(
        self, node: Any, sides: Sequence[Owners], shape: tuple[int, ...], other: tuple[int, ...]
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
        rows = Rows.of(owners, self.samples) if hasattr(node, "samples") else None
        if rows is None or not rows.each or other[0] % self.samples:
            return None
        in_order = np.arange(self.samples, dtype=np.int32).repeat(other[0] // self.samples)
        return of_first_axis(in_order, len(other))

    def _read(self, index: Tensor) -> Any:
        """Return the values of an index, None where they are not known."""
        if not self._reads or isinstance(index, FakeTensor):
            return None
        self._has_read = True
        return index.detach().cpu().numpy()

    def group(self) -> None:
        """Let layers with several rows of each sample contribute gradients of samples."""
        for node in self.nodes if self.samples else ():
            is_layer = isinstance(node, BackwardCFunction) and hasattr(node, "receive")
            if is_layer and not hasattr(node, "shared"):
                self._group_layer(node)

    def _group_layer(self, node: Any) -> None:
        is_turned = getattr(node.receive, "func", None) is receive_turned
        rows = self.rows_of(node, int(is_turned))
        is_plain = rows is not None and rows.each == 1
        self.has_orders |= rows is not None and not is_plain
        if hasattr(node, "samples"):  # a layer without a rule, which runs on entries alone
            node.samples = 0 if rows is None else self.samples if rows.each else rows.count
            node.why = "" if rows is not None else self._explain(node)
            is_plain = rows is None or rows.each is not None
        if is_plain:
            return
        self._receivers.append((node, node.receive))
        receive, *length = node.receive.args if is_turned else (node.receive,)
        if rows is None:
            receive = partial(self._receive_unproven, (node, int(is_turned)), receive)
        else:
            receive = partial(_receive_grouped, receive, rows)
        node.receive = partial(receive_turned, receive, *length) if is_turned else receive

    def _receive_unproven(
        self,
        place: tuple[Any, int],
        receive: Receive,
        contributions: Contributions,
        *changed_B: Tensor | None,
        **named: Any,
    ) -> None:
        node, axis = place
        is_other_order = shape_of(node)[axis] == self.samples
        for parameter, contribution in contributions:
            if is_other_order or len(contribution[0]) != self.samples:
                name = self._name_of(parameter)
                name, why = name.rpartition(".")[0] or name, self._explain(node)
                problem = BatchAxisError.of(name, len(contribution[0]), self.samples, why)
                self.problem = self.problem or problem
                if self.raises:
                    raise problem
                return
        receive(contributions, *changed_B, **named)

    def _explain(self, node: Any) -> str:
        """Tell why nothing proves which rows of what a node returned samples have."""
        key = node, 0
        owners = (self._owners or {}).get(key)
        if owners is None:
            stop = self._stops.get(key)
            name = "" if stop is None else operator_of(stop)
            if name in _IN_PLACE:
                return "code changes a view in place; change a copy, by masked_fill or torch.where"
            return f"it stops at {name}, which is not known" if name else ""
        if (owners == MANY).any():
            mix = self._mixes.get(key)
            how = "their losses" if mix is None else operator_of(mix)
            return f"rows of several samples meet in {how}; keep each sample's rows apart"
        if along_first_axis(owners) is None:
            return "samples lie on another of its axes; name it in batch_second, if on the second"
        if self._has_read:
            return "an index picks its rows; pick as many of each sample, in the order of samples"
        return "the losses are in another order than the rows; keep the order of samples"

    def describe(self) -> set[str]:
        """Name the graph by which rows were proven to be those of samples; empty if none were.

        It leaves lengths out: the same code on another batch is described alike.
        """
        if all(shape_of(node)[axis] == self.samples for node, axis in self._rows):
            return set()
        names = Counter(
            (node.name(), *(below.name() for below, _ in node.next_functions if below is not None))
            for node in self.nodes
        )
        return {f"rows of samples, in graph {hash(frozenset(names.items()))}"}

    def remove(self) -> None:
        """Change no more backward passes."""
        for node, receive in self._receivers:
            node.receive = receive
        self._receivers.clear()


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


def _receive_grouped(
    receive: Receive,
    rows: Rows,
    contributions: Contributions,
    *changed_B: Tensor | None,
    **named: Any,
) -> None:
    receive(
        [(p, rows.group_contribution(contribution)) for p, contribution in contributions],
        *changed_B,
        **named,
    )
