"""Describes and repeats the numbers that PyTorch's operators draw."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.private.refusals.released_state import is_same
from dpprof.private.samples.random_state import States, Watch


class Draw(NamedTuple):
    """One operator that drew."""

    func: Any
    scalars: tuple[Any, ...]
    depends_on: tuple[Tensor, ...]  # the tensors that decide on the numbers, such as probabilities
    numbers: Tensor | None  # None if they cannot be told from what else is computed


def describe(func: Any, args: Any, out: Any) -> Draw:
    """Return what an operator drew, of its arguments and its output."""
    name = func.overloadpacket.__name__
    scalars = tuple(value for value in args if isinstance(value, bool | int | float))
    tensors = tuple(value for value in args if isinstance(value, Tensor))
    is_filled = name.endswith(("_", "_like"))
    if name == "native_dropout":
        return Draw(func, scalars, (), out[1].clone())
    if not isinstance(out, Tensor) or name.startswith("rrelu"):
        return Draw(func, scalars, (), None)
    depends_on = tuple(tensor.detach().clone() for tensor in tensors[1 if is_filled else 0 :])
    return Draw(func, scalars, depends_on, out.detach().clone())


def replace(func: Any, args: Any, out: Any, numbers: Tensor) -> None:
    """Write other numbers into the output of an operator that drew."""
    if func.overloadpacket.__name__ != "native_dropout":
        out.copy_(numbers)
        return
    dropped, mask = out
    mask.copy_(numbers)
    kept = 1 - args[1]
    dropped.copy_(args[0] * mask / kept if kept else torch.zeros_like(dropped))


def common_places(
    first: Tensor, second: Tensor, *, at_end: bool, rows_at_end: bool
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the places that two tensors of one rank share, from the first or the last on."""
    few = [min(pair) for pair in zip(first.shape, second.shape, strict=True)]
    ends = [rows_at_end, *[at_end] * len(few)][: len(few)]
    of_each = (
        tuple(
            slice(size - count, size) if is_at_end else slice(count)
            for count, size, is_at_end in zip(few, part.shape, ends, strict=True)
        )
        for part in (first, second)
    )
    return next(of_each), next(of_each)


class Tape(Watch):  # type: ignore[no-untyped-call]
    """Keeps what operators draw inside the context, or repeats what they drew in another one.

    An operator gets the numbers of the ``recorded`` one of the same rank, at the same places of
    each axis, counted from its first place or, ``at_end``, from its last, whatever their shapes
    are; rows of tokens by samples, of which there are ``counts``, here and there. Where other
    tensors decide on the numbers, the rows of samples that are ``replaced`` keep their own.
    """

    def __init__(
        self,
        states: States,
        recorded: Sequence[Draw] = (),
        *,
        replaced: Sequence[int] = (),
        counts: tuple[int, int] = (1, 1),
        at_end: bool = False,
    ) -> None:
        super().__init__(states)
        self._recorded = recorded
        self._replaced, self._counts, self._at_end = list(replaced), counts, at_end
        self.made: list[Draw] = []

    def see(self, func: Any, args: Any, out: Any) -> None:
        """Keep what an operator drew, or write the recorded numbers in its place."""
        draw = describe(func, args, out)
        numbers = self._repeat(draw)
        self.made.append(draw)
        if numbers is not None:
            replace(func, args, out, numbers)

    def _repeat(self, draw: Draw) -> Tensor | None:
        """Return an operator's own numbers with the recorded ones at their places."""
        place = len(self.made)
        recorded = self._recorded[place] if place < len(self._recorded) else None
        if recorded is None or recorded.numbers is None or draw.numbers is None:
            return None
        if (recorded.func, recorded.scalars) != (draw.func, draw.scalars):
            return None
        if recorded.numbers.dim() != draw.numbers.dim():
            return None
        numbers = draw.numbers.clone()
        parts = [numbers, recorded.numbers]
        if numbers.shape != recorded.numbers.shape:
            parts = [_by_samples(*pair) for pair in zip(parts, self._counts, strict=True)]
        if parts[0].dim() != parts[1].dim():
            return None
        rows_at_end = self._at_end and self._counts[0] == self._counts[1]
        own, theirs = common_places(*parts, at_end=self._at_end, rows_at_end=rows_at_end)
        parts[0][own] = parts[1][theirs]
        if numbers.dim() and not all(map(is_same, draw.depends_on, recorded.depends_on)):
            places = [place for place in self._replaced if place < len(numbers)]
            numbers[places] = draw.numbers[places]
        return numbers


def _by_samples(numbers: Tensor, count: int) -> Tensor:
    """View rows of tokens, (B * T, ...), as (B, T, ...), if there are several for a sample."""
    rows = numbers.shape[0] if numbers.dim() else 0
    if rows <= count or rows % count or numbers.shape[1:2] == (count,):
        return numbers
    return numbers.view(count, rows // count, *numbers.shape[1:])
