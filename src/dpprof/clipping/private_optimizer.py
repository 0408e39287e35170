"""The optimizer of ``make_private``: a loop calls its ``backward``, and it keeps to a budget."""

from typing import NamedTuple

from torch import Tensor

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
    """A ``NoisyOptimizer`` that stops when a budget is spent, and knows parts of batches."""

    planned_steps: int | None = None
    """How many steps the budget allows; None for any number."""

    _part: Part | None = None

    def take_part(self, part: Part) -> None:
        """Prepare for the coming part of a batch."""
        self.signal_skip_step(not part.is_last)
        self._part = part

    def backward(self, losses: Tensor) -> None:
        """Clip and add up the gradients of a part, in place of ``losses.mean().backward()``.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone.

        Raises:
            RuntimeError: As of ``Clipping.backward``; or the budget is spent.
            ValueError: There are more or fewer losses than samples.
        """
        part = self._part
        if part is not None and losses.shape != (part.size,):
            raise ValueError(
                f"there must be one loss for each of {part.size} samples, and losses have shape "
                f"{tuple(losses.shape)}; a collator that packs samples joins them"
            )
        if self.planned_steps is not None and self.steps >= self.planned_steps:
            raise RuntimeError(
                f"the privacy budget is spent: it was planned for {self.planned_steps:,} steps, "
                "and these are done"
            )
        self.clipping.backward(losses[:0] if part is not None and part.is_empty else losses)
