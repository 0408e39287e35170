"""The optimizer of ``make_private``: a loop calls its ``backward``, and it keeps to a budget."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from dpprof.private.accounting.budget import Spent
from dpprof.private.engine.engine import Clipping
from dpprof.private.noise.inner_optimizers import refuse_optimizer
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.noise.schedules import NOISY


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

    Args:
        optimizer: Of all trained parameters of the model, and of no others.
        clipping: Of the model.
        settings: As of ``NoisyOptimizer``.

    Raises:
        ValueError: The optimizer has other parameters, or a setting is out of its range.
    """

    planned_steps: int | None = None
    """How many steps the budget allows, with no less noise than at first; None for any number."""

    spent: Spent | None = None
    """Counts the steps."""

    _part: Part | None = None
    _clipped: int | None = None
    """The clipping's count of batches after the last ``backward`` of this."""

    def __init__(self, optimizer: Optimizer, clipping: Clipping, **settings: Any) -> None:
        refuse_optimizer(optimizer)
        _refuse_other_parameters(optimizer, clipping)
        super().__init__(optimizer, clipping, **settings)

    def take_part(self, part: Part) -> None:
        """Prepare for the coming part of a batch.

        Raises:
            RuntimeError: There was no step for the part before, or this was removed.
        """
        if getattr(self.original_optimizer, NOISY, None) is not self:
            raise RuntimeError(
                "this private training ended, by remove() or by another one of its optimizer; call "
                "make_private again"
            )
        if self._step_skip_queue or self._part is not None:
            raise RuntimeError(
                "the part before had no backward and step, so parts of two batches would meet in "
                "one; take a step for every part, or call discard() and iterate again"
            )
        self.signal_skip_step(not part.is_last)
        self._part = part

    def leave_parts(self) -> None:
        """Note that a loop over parts was left, so that what follows it belongs to no part."""
        self._is_last_part = True

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

    def _refuse_failed_part(self) -> None:
        """Do nothing: a part that failed stays the one to clip next."""

    def begin_noise(self) -> None:
        """Count the step, where its noise begins."""
        super().begin_noise()
        if self.spent is not None:
            self.spent.count(self)

    def state_dict(self) -> dict[str, Any]:
        """Return that of ``NoisyOptimizer``, with what was spent."""
        state = super().state_dict()
        if self.spent is not None:
            state["privacy"]["spent"] = self.spent.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *, exact: bool = False) -> None:
        """Go on as ``NoisyOptimizer`` does; no step that was counted is forgotten."""
        super().load_state_dict(state_dict, exact=exact)
        spent = state_dict["privacy"].get("spent")
        if self.spent is not None and spent is not None:
            self.spent.load_state_dict(spent, exact=exact)

    def _refuse_beyond_plan(self) -> None:
        if self.planned_steps is None:
            return
        done = max(self.steps, 0 if self.spent is None else self.spent.steps)
        if done >= self.planned_steps:
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


def _refuse_other_parameters(optimizer: Optimizer, clipping: Clipping) -> None:
    """Refuse an optimizer of other parameters than the model trains."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.requires_grad and not clipping.clips(parameter):
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
                "does not train; make the optimizer last, once the model is as it is trained"
            )
    there = set(parameters)
    for parameter in clipping.parameters:
        if parameter not in there:
            raise ValueError(
                f"{clipping.name_of(parameter)} is trained, and the optimizer does not have it; "
                "one optimizer trains the whole model, so add the parameter, or freeze it"
            )
