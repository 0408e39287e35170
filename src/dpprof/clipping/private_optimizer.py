"""The optimizer of ``make_private``: a loop calls its ``backward``, and it keeps to a budget."""

from torch import Tensor

from dpprof.clipping.optimizer import NoisyOptimizer


class PrivateOptimizer(NoisyOptimizer):
    """A ``NoisyOptimizer`` that stops when a budget is spent, and knows parts of batches."""

    planned_steps: int | None = None
    """How many steps the budget allows; None for any number."""

    _drops = False

    def expect_part(self, *, is_last: bool, is_empty: bool) -> None:
        """Prepare for the coming part of a batch."""
        self.signal_skip_step(not is_last)
        self._drops = is_empty

    def backward(self, losses: Tensor) -> None:
        """Clip and add up the gradients of a part, in place of ``losses.mean().backward()``.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone.

        Raises:
            RuntimeError: As of ``Clipping.backward``; or the budget is spent.
        """
        if self.planned_steps is not None and self.steps >= self.planned_steps:
            raise RuntimeError(
                f"the privacy budget is spent: it was planned for {self.planned_steps:,} steps, "
                "and these are done"
            )
        self.clipping.backward(losses[:0] if self._drops else losses)
