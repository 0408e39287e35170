"""What a rule of an operator gets: one of its operands, and whose all that it returned is."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dpprof.private.graph.nodes import axes_of
from dpprof.private.graph.owners import Owners, Shape


class Operand(NamedTuple):
    """A tensor that an operator got, and the owners of all that the operator returned."""

    node: Any
    position: int  # which operand it is
    shape: Shape
    above: Sequence[Owners]
    read: Callable[[Any], Any]  # reads an index, None where its values are not known

    @property
    def output(self) -> Owners:
        """The owners of the first, or only, tensor that it returned."""
        return self.above[0]

    @property
    def axes(self) -> list[int]:
        """The axes that the operator has saved; all where it has none."""
        return axes_of(self.node, len(self.shape))


Rule = Callable[[Operand], Owners | None]
