"""The optimizer of ``make_private``: a loop calls its ``backward``, and it keeps to a budget."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpprof.private.accounting.budget import Spent, training_of
from dpprof.private.engine.engine import Clipping
from dpprof.private.loop.captured_parts import CapturedParts, Part, ToClip
from dpprof.private.loop.joined_optimizers import JoinedOptimizers
from dpprof.private.noise.inner_optimizers import refuse_optimizer, refuse_other_parameters
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.noise.quantile import QuantileBound
from dpprof.private.noise.schedules import NOISY
from dpprof.private.ranks.ranks import Settings
from dpprof.private.refusals.tensor_kinds import refuse_losses
from dpprof.private.samples.users import Users


class PrivateOptimizer(NoisyOptimizer):
    """A ``NoisyOptimizer`` that takes one step for each Poisson batch, and keeps to a budget.

    Every part that a ``PoissonLoader`` hands out goes through ``backward`` and ``step``; otherwise
    the parts of two batches could meet in one step, and a sample count twice.

    Args:
        optimizer: Of all trained parameters of the model, and of no others.
        clipping: Of the model.
        users: Whose samples are clipped as one; None where each sample is by itself.
        bound_quantile: The quantile of norms that the bound follows (``QuantileBound``); then the
            noise multiplier is that of sum and count together.
        settings: As of ``NoisyOptimizer``.

    Raises:
        ValueError: The optimizer has other parameters, or a setting is out of its range.
    """

    data = ""
    """What the data loader says of the data of a rank; the same on all."""

    planned_steps: int | None = None
    """How many steps the budget allows, with no less noise than at first; None for any number."""

    spent: Spent | None = None
    """Counts the steps."""

    captured: CapturedParts | None = None
    """Runs steps as CUDA graphs; None for an ordinary loop."""

    _clips_failed_parts_again = True
    is_thrown_away = False
    """Whether the batch that the loop is in was discarded, so that no step may apply its rest."""

    _part: Part | None = None
    _fold: int = 0
    _clipped: int | None = None  # the clipping's count of batches after the last ``backward``

    def __init__(
        self,
        optimizer: Optimizer,
        clipping: Clipping,
        *,
        users: Users | None = None,
        bound_quantile: float | None = None,
        **settings: Any,
    ) -> None:
        self.users = users
        refuse_optimizer(optimizer)
        refuse_other_parameters(optimizer, clipping)
        if bound_quantile is not None:
            _refuse_fixed_bound(clipping, settings)
            self.quantile = QuantileBound(bound_quantile, settings["expected_batch_size"])
            settings["noise_multiplier"] = self.quantile.split(settings["noise_multiplier"])
        super().__init__(optimizer, clipping, **settings)
        if isinstance(optimizer, JoinedOptimizers):
            optimizer.attach()

    def remove(self) -> None:
        """Remove clipping and noise, as ``NoisyOptimizer`` does; joined optimizers step alone."""
        super().remove()
        if isinstance(self.original_optimizer, JoinedOptimizers):
            self.original_optimizer.detach()

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
        waits = self.captured is not None and self.captured.waits_for_step
        if self._step_skip_queue or self._part is not None or waits:
            raise RuntimeError(
                "the part before had no backward and step, so parts of two batches would meet in "
                "one; take a step for every part, or call discard() and iterate again"
            )
        self.signal_skip_step(not part.is_last)
        self._part, self._fold = part, part.fold

    def leave_parts(self) -> None:
        """Note that a loop over parts was left, so that what follows it belongs to no part."""
        self._is_last_part = True

    def discard(self) -> None:
        """Throw away the sums of a batch that is not finished, and forget its part."""
        super().discard()
        self._part, self._clipped, self.is_thrown_away = None, None, True
        if self.captured is not None:
            self.captured.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients as PyTorch does; sums survive only a skipped step."""
        if self.captured is not None and not self._is_last_step_skipped:
            self.captured.drop()
        super().zero_grad(set_to_none)

    @property
    def is_within_a_batch(self) -> bool:
        """Whether there are sums that no step has applied."""
        is_replayed = self.captured is not None and self.captured.is_open
        return is_replayed or super().is_within_a_batch

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the gradient private and step, unless other parts of the batch follow."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        captured = self.captured
        if captured is None or not captured.waits_for_step:
            try:
                done = super().step()
            finally:
                if self.quantile is not None and not self._is_last_step_skipped:
                    self.max_grad_norm = self.quantile.move(self.max_grad_norm)
            if captured is not None and not self._is_last_step_skipped:
                captured.end_ordinary()
            return done
        self._refuse()
        if self.begin_step():
            captured.waits_for_step = False
        elif not captured.finish():
            self._repeat(captured)
            self.step_on_batch()
            captured.end_ordinary()
        return None

    def _repeat(self, captured: CapturedParts) -> None:
        """Clip without graphs the parts of a batch that graphs had begun.

        If one cannot be clipped, the whole batch is thrown away: a part of it must not meet others.
        """
        try:
            for to_clip in captured.take_parts():
                self._step_skip_queue.insert(0, not to_clip.part.is_last)
                self._clip(to_clip.part, to_clip.compute_losses())
                super().accumulate()
                self._step_skip_queue.pop(0)
        except BaseException:
            self.discard()
            raise

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Call a function before each step, unless accountants would count too little by it."""
        sampling = None if self.spent is None else self.spent.sampling
        if sampling is not None and (sampling.largest is not None or sampling.folds > 1):
            raise ValueError(
                "accountants count steps that draw from all samples, and keep what they draw; with "
                "folds or truncated_batch_size ask epsilon_spent() of make_private"
            )
        super().attach_step_hook(fn)

    def accumulate(self) -> None:
        """Add up a part.

        Raises:
            RuntimeError: It was clipped otherwise than by ``backward``; or the budget is spent.
        """
        self._refuse()
        super().accumulate()

    def begin_noise(self) -> None:
        """Count the step, where its noise begins; with ``bisr`` all steps, where it begins.

        Raises:
            RuntimeError: The noise of ``bisr`` begins once more than a budget allows.
        """
        super().begin_noise()
        if self.spent is None:
            return
        name, reached = training_of(self.spent.training), self.spent.reached
        reached[name] = max(self.steps, reached.get(name, 0))
        if self._is_one_mechanism and self.buffers is not None and self.buffers.done:
            return
        self._refuse_another_line()
        self.spent.count(self, 0 if self._is_one_mechanism else self._fold)

    def _settings_of_ranks(self) -> Settings:
        drawn = () if self.spent is None else self.spent.sampling
        how = f"{drawn[:2]} {drawn[4:]} {self._fold}"  # the rest follows from the samples of a rank
        drawing = {"how samples are drawn, or the fold,": how}
        return {**super()._settings_of_ranks(), **drawing, "the data, or their order,": self.data}

    @property
    def _is_one_mechanism(self) -> bool:
        return self.strategy is not None and not self.strategy.is_sampled

    def _refuse_another_line(self) -> None:
        """Refuse to count all steps of ``bisr`` once more than a budget allows."""
        is_planned = self.planned_steps is not None and self._is_one_mechanism
        if is_planned and self.spent is not None and self.spent.steps:
            raise RuntimeError(
                "the privacy budget is spent: with bisr it is for one line of steps, and the noise "
                "begins anew, as after a state without exact=True, a fork, a batch that was thrown "
                "away, or one of another fold than the next; or this run goes back"
            )

    def _count_again(self) -> None:
        """Count what samples added before a state to which this run went back.

        It is seen again, below other draws (``buffers``).
        """
        assert self.buffers is not None
        again = 1 if self._is_one_mechanism else self.buffers.strategy.bands - 1
        for age in range(min(again, self.buffers.done)):
            fold = ((self.buffers.fold or 0) - age) % self.buffers.strategy.folds
            if self.spent is not None:
                self.spent.count(self, 0 if self._is_one_mechanism else fold)

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """Return that of ``NoisyOptimizer``, with what was spent."""
        state = super().state_dict(exact=exact)
        if self.spent is not None:
            state["privacy"]["spent"] = self.spent.state_dict()
        if exact and self.captured is not None:
            state["privacy"]["secrets"]["captured"] = self.captured.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *, exact: bool = False) -> None:
        """Go on as ``NoisyOptimizer`` does; no step that was counted is forgotten.

        Args:
            state_dict: Of ``state_dict``.
            exact: As of ``NoisyOptimizer``.

        Raises:
            ValueError: As of that; or one of both runs replays CUDA graphs, which round otherwise.
            RuntimeError: As of that; or a budget of ``bisr`` is to be spent twice.
        """
        secrets = state_dict.get("privacy", {}).get("secrets") or {}
        if exact and secrets and ("captured" in secrets) != (self.captured is not None):
            raise ValueError(
                "one of both runs replays CUDA graphs, and the other does not, so it would not "
                "end with the same bits; give both the same execution, or leave out exact=True"
            )
        counts_again = exact and self.strategy is not None and self._goes_back(state_dict)
        if counts_again:
            self._refuse_another_line()
        super().load_state_dict(state_dict, exact=exact)
        spent = state_dict["privacy"].get("spent")
        if self.spent is not None and spent is not None:
            self.spent.load_state_dict(spent)
        if counts_again:
            self._count_again()
        if self.quantile is not None:
            self.quantile.keys.renew()
            if exact:
                self.quantile.keys.load_state_dict(secrets["quantile"])
        if exact and self.captured is not None:
            self.captured.load_state_dict(state_dict["privacy"]["secrets"]["captured"])

    def _goes_back(self, state_dict: Mapping[str, Any]) -> bool:
        """Tell whether steps after this state are counted, whichever optimizer took them."""
        privacy = state_dict.get("privacy", {})
        if self.spent is None or "spent" not in privacy:
            return False
        reached = self.spent.reached.get(training_of(privacy["spent"]["training"]), 0)
        return reached > int(privacy["steps"])

    def _refuse(self) -> None:
        """Refuse a batch that was clipped otherwise than by ``backward``, or beyond the budget."""
        if self.clipping.batches not in (self._batches_before, self._clipped):
            raise RuntimeError(
                "a batch was clipped by the clipping's own backward, or clipping a part was "
                "interrupted: call backward(losses) of this optimizer, which knows batches without "
                "samples; after an interrupt call discard() and iterate again"
            )
        if self.planned_steps is not None:
            self._refuse_beyond_budget(self.planned_steps)

    def _refuse_beyond_budget(self, planned_steps: int) -> None:
        """Refuse a step beyond the budget, whoever spent it."""
        done = max(self.steps, 0 if self.spent is None else self.spent.steps)
        if done >= planned_steps:
            raise RuntimeError(
                f"the privacy budget is spent: it was planned for {planned_steps:,} steps, "
                "and these are done"
            )
        if self.spent is not None and self.spent.sampling.folds > 1:
            most = self.spent.sampling.count_turns(planned_steps)
            if self.spent.count_turns_after(self, self._fold) > most:
                raise RuntimeError(
                    f"the privacy budget is spent for samples of fold {self._fold}: {most:,} steps "
                    "draw from a fold, and batches of others were left out"
                )
        planned = self._made_with["noise_multiplier"]
        if self.noise_multiplier < planned:
            raise RuntimeError(
                f"the budget was planned with a noise multiplier of {planned:g}, and it is "
                f"{self.noise_multiplier:g} now; give noise_multiplier in place of epsilon"
            )
        if self.spent is not None and (why := self.spent.find_excess()):
            raise RuntimeError(f"the privacy budget is spent: {why}")

    def backward(
        self, losses: Tensor | Callable[..., Tensor], *inputs: Any, **named: Any
    ) -> Tensor:
        """Clip and add up the gradients of a part, in place of ``losses.mean().backward()``.

        Give the function that computes the losses, and not the losses, and steps run as CUDA graphs
        where that is possible (``execution`` of ``make_private``). A graph runs what the function
        did in the first two batches: not what it prints, or appends to a list.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone; or a function
                that returns them.
            inputs: The function's arguments.
            named: Its arguments by name.

        Returns:
            The losses, (B,), detached.

        Raises:
            RuntimeError: As of ``Clipping.backward``; the samples are not those of a part that the
                data loader handed out; the budget is spent; or the function is given for some
                parts of a batch only.
            ValueError: There are more or fewer losses than samples.
            TypeError: There are arguments, and no function.
        """
        part, captured = self._part, self.captured
        if part is None:
            raise RuntimeError(
                "these samples were not drawn by the private data loader, or were clipped before; "
                "iterate over the data loader that make_private returned, and add up several "
                "losses of a sample for one backward"
            )
        self._refuse()
        if isinstance(losses, Tensor):
            if inputs or named:
                raise TypeError("backward takes either losses, or their function and its arguments")
            if captured is not None:
                captured.run_ordinary()
            return self._clip(part, losses)
        if inputs and all(isinstance(part, str) for part in inputs):
            raise TypeError(
                "backward got the names of a dictionary's parts, and not the parts: "
                "backward(losses_of, **batch)"
            )
        to_clip = ToClip(part, losses, inputs, named)
        losses_B = None if captured is None else captured.add(to_clip)
        if losses_B is not None:
            self._part = None
            return losses_B
        if captured is not None:
            self._repeat(captured)
        return self._clip(part, to_clip.compute_losses())

    def _clip(self, part: Part, losses: Tensor) -> Tensor:
        """Clip a part as an ordinary loop does; return its losses, (B,), detached."""
        refuse_losses(losses)
        if losses.shape != (part.size,):
            raise ValueError(
                f"there must be one loss for each of {part.size} samples, and losses have shape "
                f"{tuple(losses.shape)}; a collator that packs samples joins them"
            )
        losses_B = losses[:0] if part.is_empty else losses
        self.clipping.backward(losses_B, users=None if part.is_empty else part.users)
        if self.quantile is not None and self.clipping.sample_norms is not None:
            self.quantile.count(self.clipping.sample_norms, self.max_grad_norm)
        self._part, self._clipped = None, self.clipping.batches
        return losses_B.detach()


def _refuse_fixed_bound(clipping: Clipping, settings: Mapping[str, Any]) -> None:
    """Refuse what needs a bound that stays, or a count of one process (``ValueError``)."""
    refused = {
        "several ranks": clipping.ranks.size > 1,
        "clipping that is not flat": clipping.stability is not None,
        "correlated noise": settings.get("strategy") is not None,
        "secure_mode": settings.get("secure_mode", False),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(f"bound_quantile does not work with {name}; leave out one of them")
