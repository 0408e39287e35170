"""The optimizer of ``make_private``: a loop calls its ``backward``, and it keeps to a budget."""

from typing import NamedTuple

from torch import Tensor

from dpprof.clipping.budget import Spent
from dpprof.clipping.optimizer import NoisyOptimizer


class Part(NamedTuple):
    """A part of a Poisson batch."""

    size: int
    is_last: bool
    is_empty: bool
    """Whether its one sample stands for a batch without samples."""

    state: Tensor
    """Of the generator, once the batch was drawn."""


class PrivateOptimizer(NoisyOptimizer):
    """A ``NoisyOptimizer`` that takes one step for each Poisson batch, and keeps to a budget.

    Every part that a ``PoissonLoader`` hands out goes through ``backward`` and ``step``; otherwise
    the parts of two batches could meet in one step, and a sample count twice.
    """

    planned_steps: int | None = None
    """How many steps the budget allows, with no less noise than at first; None for any number."""

    spent: Spent | None = None
    """Counts the steps."""

    _part: Part | None = None
    _clipped: int | None = None
    """The clipping's count of batches after the last ``backward`` of this."""

    def take_part(self, part: Part) -> None:
        """Prepare for the coming part of a batch.

        Raises:
            RuntimeError: There was no step for the part before.
        """
        if self._step_skip_queue or self._part is not None:
            raise RuntimeError(
                "the part before had no backward and step, so parts of two batches would meet in "
                "one; take a step for every part, or call discard() and iterate again"
            )
        self.signal_skip_step(not part.is_last)
        self._part = part

    def discard(self) -> None:
        """Throw away the sums of a batch that is not finished, and forget its part."""
        super().discard()
        self._part, self._clipped = None, None

    def accumulate(self) -> None:
        """Add up a part.

        Raises:
            RuntimeError: It was clipped otherwise than by ``backward``; or the budget is spent.
        """
        if self.clipping.batches not in (self._batches_before, self._clipped):
            raise RuntimeError(
                "a batch was clipped by the clipping's own backward; call backward(losses) of this "
                "optimizer, which knows batches without samples"
            )
        self._refuse_beyond_plan()
        super().accumulate()

    def add_noise(self) -> None:
        """Add noise, and count the step."""
        super().add_noise()
        if self.spent is not None:
            self.spent.count(self)

    def _refuse_beyond_plan(self) -> None:
        if self.planned_steps is None:
            return
        if self.steps >= self.planned_steps:
            raise RuntimeError(
                f"the privacy budget is spent: it was planned for {self.planned_steps:,} steps, "
                "and these are done"
            )
        planned = self._made_with["noise_multiplier"]
        if self.noise_multiplier < planned:
            raise RuntimeError(
                f"the budget was planned with a noise multiplier of {planned:g}, and it is "
                f"{self.noise_multiplier:g} now; give noise_multiplier in place of epsilon"
            )

    def backward(self, losses: Tensor) -> None:
        """Clip and add up the gradients of a part, in place of ``losses.mean().backward()``.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone.

        Raises:
            RuntimeError: As of ``Clipping.backward``; the samples are not those of a part that the
                data loader handed out; or the budget is spent.
            ValueError: There are more or fewer losses than samples.
        """
        part = self._part
        if part is None:
            raise RuntimeError(
                "these samples were not drawn by the private data loader, or were clipped before; "
                "iterate over the data loader that make_private returned"
            )
        if losses.shape != (part.size,):
            raise ValueError(
                f"there must be one loss for each of {part.size} samples, and losses have shape "
                f"{tuple(losses.shape)}; a collator that packs samples joins them"
            )
        self._refuse_beyond_plan()
        self.clipping.backward(losses[:0] if part.is_empty else losses)
        self._part, self._clipped = None, self.clipping.batches
