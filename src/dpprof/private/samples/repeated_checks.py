"""Compares samples of a data set alone and in company: before training, and at random steps of it.

A loss that mixes samples only later, only at times or only in some batches passes a check before
training. So some steps check again; these, and the samples, come from the operating system's
randomness, so that nothing in the training can know them.
"""

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpprof.private.errors import is_count
from dpprof.private.samples.company import COMPARED, choose, compare_samples

if TYPE_CHECKING:
    from dpprof.private.engine.engine import Clipping

_log = logging.getLogger("dpprof")


class RepeatedChecks:
    """Chooses steps, each with probability ``1 / every``, and samples, and compares these.

    At ``most`` so many samples fit into memory; all else is as of ``company.compare_samples``.
    ``ValueError``: ``every`` is no whole number above zero, or ranks run each step together.
    """

    def __init__(
        self,
        clipping: "Clipping",
        losses_of: Callable[..., Tensor],
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        most: int = COMPARED,
        every: int | None = None,
        keeps_order: bool = False,
    ) -> None:
        if every is not None:
            if not is_count(every):
                raise ValueError(f"verify_every must be a whole number above 0, and is {every!r}")
            if clipping.ranks.is_sharded:
                raise ValueError(
                    "under fully_shard ranks run each layer together, and each would verify at "
                    "other steps; leave out verify_every"
                )
            clipping.repeated = self
        self._every = None if every is None else int(every)
        self._clipping, self._losses_of = clipping, losses_of
        self._dataset, self._collate, self._most = dataset, collate, most
        self._goes_on = self.is_forced = False
        self._keeps_order = keeps_order

    def draw(self) -> bool:
        """Draw whether to verify in a step."""
        assert self._every is not None
        return random.SystemRandom().randrange(self._every) == 0

    def is_due(self, *, goes_on: bool) -> bool:
        """Draw, unless forced, whether to verify a step, at its first part, if others follow."""
        if self.is_forced:
            self.is_forced = False
            return True
        is_first, self._goes_on = not self._goes_on, goes_on
        return is_first and self.draw()

    def compare(self, *, at_random: bool = True) -> list[str]:
        """Compare samples, and leave all as before; return what could not be compared, and why."""
        load = partial(choose, self._dataset, self._most, at_random=at_random)
        return compare_samples(
            *(self._clipping, self._losses_of, load, self._collate), keeps_order=self._keeps_order
        )

    def compare_first(self) -> None:
        """Compare some of the first samples, and log what could not be compared."""
        for problem in self.compare(at_random=False):
            _log.warning("check: samples are not compared alone and in company: %s", problem)
