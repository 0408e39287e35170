"""Proves from the graph which samples' rows a layer has, and lets it contribute what samples do.

Many models join samples and tokens before a layer, ``x.view(-1, d)``, cut images into windows, or
give a layer several rows of each sample: pairs, augmentations, negatives. Then the first axis has
more entries than there are losses. Its length alone proves nothing: tokens that were gathered for
an expert may be as many. The graph proves it (``proof``). Code around layers must keep samples
apart; so the first batch whose graph has these operators is verified (``first_batch``), and again
wherever the graph changes. Where the graph does not prove it, and as many rows as losses count as
one a sample, each batch is verified.

Shape legend: B samples, R rows.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from dpprof.private.contributions.contributions import Contributions, Receive, receive_turned
from dpprof.private.errors import BatchAxisError
from dpprof.private.graph.nodes import (
    find_users,
    nodes_behind,
    operator_of,
    outline,
    past_identities,
    shape_of,
    shapes_of,
)
from dpprof.private.graph.owners import MANY, Owners, along_first_axis, merge, whole
from dpprof.private.graph.proof import Output, Proof
from dpprof.private.graph.rows import Rows

_IN_PLACE = {"AsStrided", "CopySlices"}  # what changes of views in place leave in a graph


class Layout:
    """Tells which rows samples have in one batch, by its losses, (B,); None for no batch.

    ``in_order`` are outlines of graphs that were proven to keep samples in order, where lengths
    tell the rows of a layer. ``reads`` tells whether an index may be read; where a graph is
    captured, others will be there later.
    """

    def __init__(
        self,
        losses: Tensor | None = None,
        name_of: Callable[[nn.Parameter], str] = str,
        *,
        in_order: Collection[int] = (),
        reads: bool = True,
    ) -> None:
        self.samples = 0 if losses is None else len(losses)
        self.nodes = [] if losses is None else list(nodes_behind(losses))
        """The nodes behind the losses."""

        start = (None, 0) if losses is None else (losses.grad_fn, losses.output_nr)
        self._losses: Output = past_identities(*start)
        self.outline = outline(self.nodes)
        self._proves = self.outline not in in_order
        self._name_of, self._reads = name_of, reads
        self._proof: Proof | None = None  # once rows are asked for that lengths do not tell
        self._rows: dict[tuple[Any, int], Rows | None] = {}
        self._receivers: list[tuple[Any, Receive]] = []
        self.problem: BatchAxisError | None = None  # of the first layer that is not proven
        self.is_trusted = False  # whether rows count as those of samples by their number alone
        self.raises = False  # whether such a layer is refused at once, and not only noted
        self.has_orders = False  # that lengths do not tell: then all of the graph is looked at

    @cached_property
    def above(self) -> Mapping[Any, list[tuple[Any, int]]]:
        """The users of each node's output, and as which operand they use it."""
        return find_users(self.nodes)

    def rows_of(self, node: Any, axis: int = 0) -> Rows | None:
        """Return which rows, on an axis of what a node returned, samples have, if proven."""
        count = shape_of(node)[axis : axis + 1]
        if not self.samples or not count:
            return None
        # As many rows as losses are one a sample, in order, unless other orders are looked for.
        if self.samples == 1 or (count[0] == self.samples and not self._proves):
            return Rows.in_order(self.samples, count[0])
        if (node, axis) not in self._rows:
            self._rows[node, axis] = self._find_rows(node, axis, count[0])
        return self._rows[node, axis]

    def may_be_of_samples(self, leaf: Any) -> bool:
        """Tell whether a leaf may have entries of each sample, by its length."""
        sizes = shape_of(leaf)[:2]
        return self.samples < 2 or any(size % self.samples == 0 for size in sizes)  # noqa: PLR2004

    def is_shared(self, leaf: Any) -> bool:
        """Tell whether losses of several samples depend on an element of a leaf."""
        return self.samples > 1 and self._prove().is_shared(leaf)

    def _prove(self) -> Proof:
        """Follow the graph, at the first call."""
        if self._proof is None:
            self._proof = Proof(self._losses, self.samples, self.above, reads=self._reads)
            self.has_orders |= self._proof.has_orders
        return self._proof

    def _find_rows(self, node: Any, axis: int, count: int) -> Rows | None:
        """Return the rows of samples by the graph."""
        proof = self._prove()
        along = self._owners_along(proof, node, axis, count)
        if along is None or (along == MANY).any():
            # Samples may lie on another axis, or code mixes them: ``first_batch`` shows it.
            self.is_trusted |= count == self.samples
            return Rows.in_order(count, count) if count == self.samples else None
        outputs = range(len(shapes_of(node)))
        self.is_trusted |= any((node, output) in proof.trusted for output in outputs)
        rows = Rows.of(whole(along, 0, count), self.samples)
        # How many rows a sample has may depend on data, which a captured step does not read again.
        return rows if rows is None or rows.is_in_blocks or self._reads else None

    @staticmethod
    def _owners_along(proof: Proof, node: Any, axis: int, count: int) -> Owners | None:
        """Return the owners of the rows of all that a node returned; None if they are unknown."""
        along = []
        for output, shape in enumerate(shapes_of(node)):
            owners = proof.owners.get((node, output))
            if shape[axis : axis + 1] == (count,) and owners is not None:
                along.append(along_first_axis(np.moveaxis(owners, axis, 0)))
        rows = [owners_R for owners_R in along if owners_R is not None]
        return merge(rows) if rows and len(rows) == len(along) else None

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
            # It refuses what is unproven itself, and cuts rows in order itself.
            is_plain = rows is None or rows.each is not None
        if is_plain:
            return
        self._receivers.append((node, node.receive))
        # Rows are grouped behind the turn that puts the batch first.
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
        proof, key = self._proof, (node, 0)
        if proof is None or (owners := proof.owners.get(key)) is None:
            stop = None if proof is None else proof.stops.get(key)
            name = "" if stop is None else operator_of(stop)
            if name in _IN_PLACE:
                return "code changes a view in place; change a copy, by masked_fill or torch.where"
            return f"it stops at {name}, which is not known" if name else ""
        if (owners == MANY).any():
            mix = proof.mixes.get(key)
            how = "their losses" if mix is None else operator_of(mix)
            return f"rows of several samples meet in {how}; keep each sample's rows apart"
        if along_first_axis(owners) is None:
            return "samples lie on another of its axes; name it in batch_second, if on the second"
        if proof.has_read:
            return "an index picks its rows; keep the order of samples, if captured as many of each"
        return "the losses are in another order than the rows; keep the order of samples"

    def describe(self) -> set[str]:
        """Name the graph by which rows count as those of samples, without lengths; or nothing."""
        are_one_each = all(shape_of(node)[axis] == self.samples for node, axis in self._rows)
        if are_one_each and not self.is_trusted:
            return set()
        return {f"rows of samples, in graph {self.outline}"}

    @property
    def doubt(self) -> str:
        """Why each batch like this is verified; nothing where the graph proves its rows."""
        if not self.is_trusted:
            return ""
        stop = next(iter(self._prove().stops.values()), None)
        where = "" if stop is None else f" where it stops at {operator_of(stop)}"
        return f"the graph does not show whose rows layers get{where}, so each batch is verified"

    def remove(self) -> None:
        """Change no more backward passes."""
        for node, receive in self._receivers:
            node.receive = receive
        self._receivers.clear()


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
