"""Finds what enters a model for all samples at once, and its per-sample gradients, from the graph.

A class token, a table of positions or the scale of a block is one value for all samples. An
operator gives it a batch axis: an addition, a product, an expansion. The gradient of that
operator's output, of one sample, is that sample's gradient of the value, so it is taken there,
before autograd adds up the samples. Between the parameter and that operator there may be operators
of one operand, which cannot bring in a batch; samples' gradients go back through each of them.

The graph decides, and not names or lengths: a value enters for all samples where an operator
repeats it along the first axis of its output, and that has one entry for each loss. As for every
layer, the code that follows must keep samples apart, which the first batch shows.

Shape legend: B samples.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from dpprof.private.errors import UnsupportedError
from dpprof.private.graph.layout import Layout
from dpprof.private.graph.nodes import dtype_of, is_read_once, kind_of, shape_of
from dpprof.private.graph.rows import Rows
from dpprof.private.norms.tiles import accumulator_of

_OF_ONE = {
    *("Abs", "Cos", "Cumsum", "Exp", "Expm1", "Gelu", "Log", "Log1P", "LogSoftmax", "Mean", "Neg"),
    *("Pow", "Reciprocal", "Relu", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "Softmax"),
    *("Softplus", "Sqrt", "Sum", "Tanh"),
    *("Alias", "Clone", "Contiguous", "Diagonal", "Expand", "Flip", "Index", "IndexSelect"),
    *("Conj", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose"),
    *("Unfold", "UnsafeView", "Unsqueeze", "View", "ViewAsComplex", "ViewAsReal"),
}
"""Operators of one tensor, by the names of their nodes; some have a form of two tensors too."""

_SUMS = {"Add", "Sub"}
_ALIKE = {*_SUMS, "Div", "Mul", "Where"}
"""Operators that do the same to each sample's gradient where they repeat nothing: they add a mask
that is alike for all samples, or multiply with a number."""

LOSSES = "the losses"

_ENTERING = {"Add", "Sub", "Mul", "Expand", "Repeat", "Where"}  # may repeat an operand along axis 0


class _Entry(NamedTuple):
    """An operator that repeats a value for all samples."""

    node: Any
    operand: int
    shape: tuple[int, ...]  # the shape of its operand
    is_complex: bool  # whether its operand is; the gradient of a real operand is the real part
    rows: Rows  # which rows of its output samples have
    moves: list[tuple[Any, int]]  # operators between, from the value on, and their operands

    def describe(self) -> str:
        """Tell the way by which it enters, without the lengths of axes."""
        moves = [node.name() for node, _ in self.moves]
        return f"operand {self.operand} of {self.node.name()}, {len(self.shape)} axes, by {moves}"

    def differentiate(self, g: Tensor) -> Tensor:
        """Turn the gradient of the output, with rows of samples, into the value's; (B, ...)."""
        kind = kind_of(self.node)
        if kind == "Mul":
            other = self.node._saved_self if self.operand else self.node._saved_other  # noqa: SLF001
            g = g * other.conj()
        elif kind == "Where":
            is_first = self.node._saved_condition  # noqa: SLF001
            g = g.masked_fill(is_first if self.operand else ~is_first, 0)
        elif self.operand and kind in _SUMS:
            alpha = self.node._saved_alpha  # noqa: SLF001
            g = g * (alpha if kind == "Add" else -alpha).conjugate()
        g = g if self.is_complex else g.real
        padded = (1,) * (g.dim() - len(self.shape)) + self.shape
        axes = [axis for axis in range(1, g.dim()) if padded[axis] == 1 != g.shape[axis]]
        if axes:
            g = g.sum(axes, keepdim=True, dtype=accumulator_of(g.dtype))
        if kind == "Repeat":
            g = torch.unflatten(g, 0, (-1, *self.shape[:1]))
            g = Rows.in_order(self.rows.samples, len(g)).sum(g)
        else:
            g = self.rows.sum(g.reshape(-1, *self.shape))
        for node, operand in reversed(self.moves):
            g = torch.func.vmap(partial(_pull_back, node, operand))(g)
        return g


def _pull_back(node: Any, operand: int, g: Tensor) -> Tensor:
    gradients = node(g)
    gradient: Tensor = gradients[operand] if isinstance(gradients, tuple) else gradients
    return gradient


class Broadcast:
    """Per-sample gradients of a value that enters for all samples, by its entries, if B > 1."""

    def __init__(self, entries: Collection[_Entry]) -> None:
        self._is_single = not entries
        self._parts: list[Tensor] = []
        self._handles = [
            entry.node.register_prehook(partial(self._receive, entry)) for entry in entries
        ]

    @torch.no_grad()
    def _receive(self, entry: _Entry, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            self._parts.append(entry.differentiate(gradients[0]))

    def take(self, gradient: Tensor) -> Tensor | None:
        """Return the per-sample gradients of one backward, once; (B, shape of the value).

        None if there are none: then ``gradient``, autograd's sum, came another way.
        """
        if self._is_single:
            return gradient[None]
        parts, self._parts = self._parts, []
        return sum(parts[1:], parts[0]) if parts else None

    def remove(self) -> None:
        """Look at no more backward passes."""
        for handle in self._handles:
            handle.remove()


class Broadcasts:
    """What enters for all samples of a batch, whose rows ``layout`` knows.

    ``leaves`` are parameters that no layer's rule runs; ``UnsupportedError`` if one enters in
    another way.
    """

    def __init__(
        self,
        layout: Layout,
        leaves: Collection[nn.Parameter] = (),
        name_of: Callable[[nn.Parameter], str] = str,
    ) -> None:
        self._layout, samples = layout, layout.samples
        self.of: dict[nn.Parameter, Broadcast] = {}  # the gradients of each leaf
        self.ways: set[str] = set()  # how values enter: equal lengths may look otherwise
        self._all: list[Broadcast] = []
        self._lookups: list[Any] = []
        try:
            for node in layout.nodes if samples else ():
                if hasattr(node, "is_lookup") or getattr(node, "variable", None) in leaves:
                    self._add(node, name_of)
        except BaseException:
            self.remove()
            raise

    def _add(self, node: Any, name_of: Callable[[nn.Parameter], str]) -> None:
        samples = self._layout.samples
        leaf = getattr(node, "variable", None)
        name = name_of(node.clipped[0] if leaf is None else leaf)
        entries: list[_Entry] = []
        others: set[str] = set()
        if samples > 1:
            entries, others = follow(node, self._layout.above, self._layout.rows_of)
        moves = (operator for entry in entries for operator, _ in entry.moves)
        if any(map(is_read_once, (*(entry.node for entry in entries), *moves))):
            raise UnsupportedError(
                f"{name} enters for all samples inside of a checkpoint, by an operator whose "
                "operands a checkpoint hands out once, such as a product; name a module around it "
                "that gets and returns samples in as_one=[...], do not checkpoint it, or freeze it"
            )
        self.ways |= {f"{name}: {entry.describe()}" for entry in entries}
        if leaf is None and entries and others:
            raise UnsupportedError(
                f"{name} is looked up once for all samples, and also goes "
                f"into {min(others)}; look it up for each sample, or freeze it"
            )
        if leaf is None and (entries or samples == 1):
            node.shared = Broadcast(entries)
            self._lookups.append(node)
            self._all.append(node.shared)
        if leaf is None:
            return
        if others:
            raise UnsupportedError(
                f"{name} belongs to a module that no rule runs, and goes into "
                f"{min(others)}; there clipping knows parameters that are added to, multiplied "
                "with or expanded to all samples on the first axis; move it to a layer that gets "
                "the batch, name a module around it in as_one=[...], or freeze it"
            )
        if entries or samples == 1:
            self.of[leaf] = Broadcast(entries)
            self._all.append(self.of[leaf])

    def remove(self) -> None:
        """Look at no more backward passes."""
        self._layout.remove()
        for broadcast in self._all:
            broadcast.remove()
        for node in self._lookups:
            del node.shared
        self._lookups.clear()
        self._all.clear()
        self.of.clear()


def _is_alike(user: Any, kind: str, operand: int, out: tuple[int, ...]) -> bool:
    """Tell whether an operator of two operands does not have the batch on its first axis yet."""
    if kind in _SUMS or (kind in _ALIKE and out[:1] == (1,)):
        return True
    if kind not in ("Mul", "Div") or operand:
        return False
    number = user._saved_other  # noqa: SLF001
    return number is not None and not number.dim()


def follow(
    value: Any, above: Mapping[Any, list[tuple[Any, int]]], rows_of: Callable[[Any], Rows | None]
) -> tuple[list[_Entry], set[str]]:
    """Return where a value enters for all samples, and the other operators that use it.

    The value is the node of a leaf, or of a lookup; ``above`` are the users of each node, and
    ``rows_of`` tells which rows of what a node returned samples have.
    """
    entries: list[_Entry] = []
    others: set[str] = set()
    waiting: list[tuple[Any, list[tuple[Any, int]]]] = [(value, [])]
    while waiting:
        node, moves = waiting.pop()
        shape = shape_of(node)
        users = above.get(node, [])
        if not users:
            others.add(LOSSES)
        for user, operand in users:
            if isinstance(user, BackwardCFunction):
                leaf = getattr(value, "variable", value)
                if not any(leaf is parameter for parameter in getattr(user, "clipped", ())):
                    others.add(type(user).__name__.strip("_").removesuffix("Backward"))
                continue  # a layer's rule takes its own parameters
            kind, out = kind_of(user), shape_of(user)
            # It may repeat its operand along the first axis of its output.
            is_longer = len(out) == len(shape) > 0 and shape[0] == 1 != out[0]
            is_repeated = kind in _ENTERING and (len(out) > len(shape) or is_longer)
            if kind == "Repeat":
                is_repeated &= out[1:] == shape[1:]
            rows = rows_of(user) if is_repeated else None
            has_parts = rows is None or not rows.each or not shape or rows.each % shape[0]
            if kind == "Repeat" and has_parts:
                rows = None  # a sample has parts of the value
            if rows is not None:
                entries.append(_Entry(user, operand, shape, dtype_of(node).is_complex, rows, moves))
            elif (kind in _OF_ONE and len(user.next_functions) == 1) or (
                out == shape and _is_alike(user, kind, operand, out)
            ):
                waiting.append((user, [*moves, (user, operand)]))
            else:
                others.add(user.name())
    return entries, others
