"""Runs of a collate_fn and a loss on the same numbers, for batches that differ in one sample.

Shape legend: B samples.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpprof.private.refusals.released_state import is_same
from dpprof.private.samples import batches
from dpprof.private.samples.drawn_numbers import Draw, Tape, common_places

if TYPE_CHECKING:
    from dpprof.private.samples.company import Company
    from dpprof.private.samples.random_state import Read


class Run:
    """Collates and computes samples, with the numbers that were drawn in the ``first`` run."""

    def __init__(
        self,
        company: "Company",
        order: list[int],
        first: "Run | None" = None,
        *,
        at_end: bool = False,
    ) -> None:
        self.order, states = order, company.states
        self.start: Read = first.start if first else states.read()
        self.changed = [at for at, place in enumerate(order) if first and place != first.order[at]]
        counts = len(order), len(first.order) if first else 1
        tape = partial(Tape, states, replaced=self.changed, counts=counts, at_end=at_end)
        states.write(self.start)
        with tape(recorded=first.collated if first else ()) as of_batch:
            self.batch = company.gather(order)
        self.collated: list[Draw] = of_batch.made
        self.middle: Read = states.read()
        if first:
            states.write(first.middle)
        with tape(recorded=first.computed if first else ()) as of_losses:
            self.losses_B = company.compute(self.batch, len(order))
        self.computed: list[Draw] = of_losses.made
        self.end: Read = states.read()

    def draws_as(self, first: "Run") -> bool:
        """Tell whether as many numbers were drawn, so that those of one sample are the same."""
        own, other = (
            (len(run.collated), len(run.computed), run.middle[2], run.end[2])
            for run in (self, first)
        )
        return own == other

    def draws_rows_as(self, first: "Run") -> bool:
        """Tell whether a smaller batch's numbers can be told: not of several rows for a sample."""
        few, count = len(self.order), len(first.order)
        own, other = ([*run.collated, *run.computed] for run in (self, first))
        for pair in zip(own, other, strict=False) if few < count else ():
            sizes = zip(*(getattr(draw.numbers, "shape", ()) for draw in pair), strict=False)
            is_of_several = any(size * count == all_ * few > few * count for size, all_ in sizes)
            if is_of_several or pair[0].scalars != pair[1].scalars:
                return False
        return True

    def hides(self, first: "Run") -> bool:
        """Tell whether numbers are unknown that follow the shapes of a batch."""
        drawn = [*self.collated, *self.computed]
        is_known = all(draw.numbers is not None for draw in drawn)
        return not is_known and self.shapes != first.shapes

    @property
    def shapes(self) -> list[Any]:
        """The shapes of the batch's parts, without the axis of samples."""
        return shapes_of(self.batch, len(self.order))

    def is_sorted_as(self, first: "Run", allowed_B: Tensor) -> bool:
        """Tell whether all losses but those replaced are the first run's, in any order."""
        agree_BB = agree(self.losses_B[:, None], first.losses_B, allowed_B)
        few, others = len(self.changed), len(first.order) - len(self.order)
        is_new, is_gone = (int((~agree_BB.any(axis)).sum()) for axis in (1, 0))
        return is_new <= few and is_gone <= few + others

    def has_data_of(self, first: "Run", stays_B: Tensor) -> bool:
        """Tell whether those that stay have the data of the first run, where both have places."""
        places = stays_B.nonzero().flatten().tolist()
        kept = [batches.take(run.batch, len(run.order), places) for run in (self, first)]
        pairs = [
            pair
            for pair in zip(*(leaves_of(batch, len(places)) for batch in kept), strict=False)
            if all(isinstance(leaf, Tensor) for leaf in pair)
        ]
        return any(_overlap(pairs, at_end=at_end) for at_end in (False, True))


def _overlap(pairs: Sequence[tuple[Tensor, Tensor]], *, at_end: bool) -> bool:
    """Tell whether the tensors of each pair are the same where they have the same places."""
    for first, second in pairs:
        if first.dim() == second.dim():
            own, other = common_places(first, second, at_end=at_end, rows_at_end=False)
            if not is_same(first[own], second[other]):
                return False
    return True


def agree(found_B: Tensor, expected_B: Tensor, allowed_B: Tensor) -> Tensor:
    """Tell which losses differ by no more than is allowed; those that are no numbers agree."""
    is_nan = found_B.isnan() & expected_B.isnan()
    return is_nan | (found_B == expected_B) | ((found_B - expected_B).abs() <= allowed_B)


def leaves_of(batch: Any, count: int) -> list[Any]:
    """List the parts of a batch that have an entry for each sample."""
    return [leaf for _, leaf in batches.find_split(batch, count)]


def shapes_of(batch: Any, count: int) -> list[Any]:
    """List the shapes of these parts, without the axis of samples."""
    return [tuple(getattr(leaf, "shape", ()))[1:] for leaf in leaves_of(batch, count)]
