"""Compares steps of a loop with per-sample gradients by definition, one duty after the other.

Shape legend: B samples, T tokens.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.private.checks.batch import TrainingBatch, count_samples
from dpprof.private.checks.draws import StepWatcher
from dpprof.private.checks.effects import (
    LIMIT_OF_16_BITS,
    compare_noise,
    find_resting,
    limit_of,
    refuse_changes,
)
from dpprof.private.checks.gradients import (
    Samples,
    clip,
    compare_collated,
    compare_company,
    find_difference,
    find_part_of_all,
    norm_of,
    read_losses,
    take_alone,
    take_together,
)
from dpprof.private.checks.loop import (
    Gradients,
    Loop,
    StepEffects,
    WrongScaleError,
)
from dpprof.private.checks.mistakes import (
    compare_losses,
    compare_norms,
    diagnose,
    find_shared_layer,
    refuse_other_loss,
)
from dpprof.private.checks.padding import change_padding
from dpprof.private.checks.settings import Mechanism
from dpprof.private.errors import is_own
from dpprof.private.graph.nodes import nodes_behind
from dpprof.private.samples.company import COMPANY, WrongTrainingError
from dpprof.private.substitutes import substitute

_MIXES = "samples are mixed or permuted before this layer, or its input has another axis first"

_DRAWN_AGAIN = (
    "backward draws other numbers than forward did (checkpoint with preserve_rng_state=True)"
)

_log = logging.getLogger("dpprof")


class Checked(NamedTuple):
    """What was checked, and how well it agrees."""

    samples: int
    parameters: int
    """How many parameters are trained."""

    max_relative_error: float
    """The largest relative error of the gradient that the optimizer is given, without noise."""

    checked: tuple[str, ...]
    unchecked: dict[str, str]
    """What could not be checked, and why."""

    obstacles: tuple[str, ...] = ()
    """What keeps the training from learning, a sentence each."""


@dataclass
class Comparison:
    """One check and its results so far."""

    loop: Loop
    batch: TrainingBatch
    tolerance: float | None
    samples: Sequence[Any] = ()
    collate: Callable[[list[Any]], Any] | None = None
    limit: float = 0.0
    worst: float = 0.0
    is_random: bool = False
    is_each: bool = False  # whether the loss function returns one loss for each sample
    hides_layers: bool = False
    checked: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)

    def run(self, padding: Tensor | None) -> Checked:
        """Compare all; ``padding`` are tokens that must not matter."""
        loop = self.loop
        loop.settings.verify(loop.names)
        self.checked.append("every trained parameter is in the optimizer")
        with loop.quiet(), ExitStack() as stack:
            is_random = self._is_random()
            if is_random and loop.clipping is not None and not self.loop.by_hand:
                stack.enter_context(loop.evaluation())
                self.is_random = True
                is_random = self._is_random()
            if is_random:
                raise ValueError(
                    "loss draws numbers that cannot be repeated, and gives the same batch another "
                    "loss each time; draw with PyTorch's functions, or with generators of NumPy or "
                    "Python"
                )
            samples = self._take_samples().join(loop.users)
            self._compare_company()
            taken = self._compare_gradients(samples)
            self._compare_with_dropout()
            self._compare_changes(samples, taken)
            self._try_noise(taken)
            self._compare_padding(taken, padding)
            self._try_empty()
        return Checked(
            self.batch.samples, len(loop.trained), self.worst, tuple(self.checked), self.unchecked
        )

    def _is_random(self) -> bool:
        """Record what the loss draws, and tell whether the same draws give another loss."""
        value = self.loop.record(self.batch)
        if not self.batch.samples:
            self.batch = self.batch._replace(samples=count_samples(value, self.batch))
            self.loop.draws.samples = self.batch.samples
        with self.loop.plain() as model, self.loop.drawing():  # a loss may contain a gradient
            value_again = self.batch.call(self.loop.loss, model)
        losses, again = (read_losses(v, self.batch.samples) for v in (value, value_again))
        self.is_each = losses.dim() > 0
        return not torch.equal(losses.nan_to_num(), again.nan_to_num())

    def _take_samples(self) -> Samples:
        """Compute the samples' gradients: alone, or in the batch where they rightly differ."""
        samples, reason = take_alone(self.loop, self.batch)
        if samples is not None:
            try:
                self._compare_losses(samples)
            except WrongTrainingError as error:
                if isinstance(error, WrongScaleError):
                    raise
                if reason is None:
                    part = find_part_of_all(self.loop, self.batch)
                    raise (WrongTrainingError(part) if part else error) from error
            else:
                return samples
        together = take_together(self.loop, self.batch)
        if together is None:
            raise ValueError(f"{reason}; let loss return one loss for each sample")
        self._compare_losses(together, are_alone=False)
        shows_nothing = compare_company(self.loop, self.batch, together, self.limit)
        hidden = "the loss's scale is not checked"
        if shows_nothing is None:
            self.checked.append("each sample's loss is the same among copies of the sample")
        else:
            hidden += ", nor that it keeps samples apart"
        self.unchecked["each sample alone"] = f"{reason}; so {hidden}"
        _log.warning("check: %s; so %s", reason, hidden)
        return together

    def _compare_company(self) -> None:
        """Compare samples alone and in company, collated anew or cut from the batch."""
        if not self.is_each:
            self.unchecked[COMPANY] = "loss does not return one loss for each sample"
            return
        problems = compare_collated(self.loop, self.batch, self.samples, self.collate)
        if problems:
            self.unchecked[COMPANY] = "; ".join(problems)
        else:
            self.checked.append(COMPANY)

    def _compare_losses(self, samples: Samples, *, are_alone: bool = True) -> None:
        count = self.batch.samples
        watch = StepWatcher(silent=False)
        with self.loop.plain() as model, watch, self.loop.drawing():
            value = self.batch.call(self.loop.loss, model)
            losses = read_losses(value, count)
            names = [type(node).__name__ for node in nodes_behind(losses)]
            self.hides_layers = "CheckpointFunctionBackward" in names
            gradients = self.loop.differentiate(losses)
        losses = losses.detach()
        refuse_other_loss(self.loop, value)
        usual = limit_of(losses, self.loop.trained, in_16_bits=watch.in_16_bits)
        self.limit = usual if self.tolerance is None else self.tolerance
        if not samples.losses_B.isfinite().all():
            raise WrongTrainingError("the loss of a sample is not finite")
        if not are_alone:
            return
        if losses.dim() or not self.loop.by_hand:
            averages = self.loop.settings.averages
            compare_losses(losses.cpu().double(), samples.losses_B, self.limit, averages=averages)
            divisor = count if averages and not losses.dim() else 1
            unclipped = clip(samples, [(self.loop.trained, math.inf)], divisor)
            first, _ = find_difference(gradients, unclipped, self.limit)
            if first is not None:
                raise WrongTrainingError(
                    f"{self.loop.names[first]}: the gradient of the batch's loss is not that of "
                    "its samples alone: samples are mixed, or the mean is over all tokens of the "
                    "batch" + (f", or {_DRAWN_AGAIN}" if self.loop.draws.made else "")
                )
        self.checked.append("each sample's loss is its own")

    def _take(self, batch: TrainingBatch, *, silent: bool = True, times: int = 1) -> StepEffects:
        try:
            taken = self.loop.take(batch, silent=silent, times=times)
        except WrongTrainingError:
            raise
        except Exception as error:  # noqa: BLE001 (any step may fail in any way)
            shared = find_shared_layer(self.loop, self.batch)
            said = f": {error}" if is_own(error) else ""
            reason = shared or f"the step fails: {type(error).__name__}{said}"
            raise WrongTrainingError(reason, str(error)) from None
        if taken is None:
            raise WrongTrainingError("the step did not step the optimizer")
        return taken

    def _compare_gradients(self, samples: Samples) -> StepEffects:
        """Compare at the loop's own bound, and at one that clips only some of the samples."""
        loop = self.loop
        taken = self._take(self.batch)
        if taken.in_16_bits and self.tolerance is None:
            self.limit = LIMIT_OF_16_BITS  # the loop may compute otherwise than loss
        self._compare(samples, taken)
        norms_B = samples.norms(loop.trained)
        bound = math.hypot(*(limit for _, limit in loop.settings.groups))
        if isinstance(loop.private, Mechanism):
            if norms_B.min() >= bound:
                self.unchecked["scale of the loss"] = "every sample of the batch is clipped"
            if norms_B.max() <= bound:
                self.unchecked["clipping"] = "no sample of the batch is clipped"
        else:
            with loop.settings.bounds_times(float(norms_B.topk(2).values.mean()) / bound):
                self._compare(samples, self._take(self.batch))
        again = self._take(self.batch, times=2)
        if find_difference(again.gradients, taken.gradients, self.limit)[0] is not None:
            raise WrongTrainingError(
                "a second step adds to the gradients of the first; clear them in each step"
            )
        self.checked.append("the gradient is that of single samples, clipped")
        return taken

    def _compare(self, samples: Samples, taken: StepEffects) -> None:
        loop = self.loop
        expected = self._clip(samples)
        first, worst = find_difference(taken.gradients, expected, self.limit)
        if self.hides_layers and first is not None:
            raise ValueError(
                "reentrant checkpointing hides layers from the check; check with "
                "use_reentrant=False"
            )
        self._compare_norms(samples, taken, _MIXES)
        if not norm_of(expected):
            raise WrongTrainingError("the gradient of every sample is zero, so nothing is learned")
        if first is None:
            self.worst = max(self.worst, worst)
            return
        again = self._take(self.batch)
        if find_difference(again.gradients, taken.gradients, self.limit)[0] is not None:
            raise ValueError(
                "step is random beyond Gaussian noise of torch, with dropout off, and cannot be "
                "compared"
            )
        if loop.by_hand and loop.draws.elsewhere is not None:
            raise ValueError(
                "the loss draws numbers with NumPy or Python, so a step by hand that draws them in "
                "another order cannot be compared; draw them with PyTorch"
            )
        name, gradient = loop.names[first], taken.gradients[first]
        shared = find_shared_layer(loop, self.batch)
        if reason := shared or diagnose(loop, samples, taken.gradients, self.limit):
            raise WrongTrainingError(reason)
        if not gradient.any():
            raise WrongTrainingError(
                f"{name}: the optimizer is given no gradient, and it is trained"
            )
        if loop.by_hand and loop.draws.made:
            raise ValueError(
                f"{name}: the gradient of step is wrong, or it draws the numbers of its losses in "
                "another order than loss; let loss take them from the batch, and check again"
            )
        raise WrongTrainingError(
            f"{name}: the gradient is not the sum of the samples' clipped gradients over "
            f"{loop.settings.divisor:g}",
            f"the error is {float((gradient - expected[first]).norm()):.2g}, and the gradient's "
            f"norm {float(expected[first].norm()):.2g}",
        )

    def _clip(self, samples: Samples) -> Gradients:
        settings = self.loop.settings
        return clip(samples, settings.groups, settings.divisor, **settings.factor)

    def _compare_norms(self, samples: Samples, taken: StepEffects, reason: str) -> None:
        """Compare the norms that a clipping found, unless a step by hand splits the batch."""
        if self.loop.clipping is not None and not self.loop.by_hand:
            compare_norms(self.loop, samples, taken.squares, self.limit, reason)

    def _compare_with_dropout(self) -> None:
        loop = self.loop
        if not loop.dropout and not self.is_random:
            return
        if self.loop.by_hand:
            self.unchecked["dropout"] = "a step by hand may draw its numbers in another order"
            return
        with substitute(loop, "draws", loop.draws):
            with loop.dropout_on():
                loop.record(self.batch)
            with loop.dropout_on():
                samples = take_together(loop, self.batch)
            if samples is None:
                self.unchecked["dropout"] = "loss does not return one loss for each sample"
                return
            with loop.dropout_on():
                taken = self._take(self.batch)
        samples = samples.join(loop.users)
        self._compare_norms(samples, taken, _DRAWN_AGAIN)
        expected = self._clip(samples)
        first, worst = find_difference(taken.gradients, expected, self.limit)
        if first is not None:
            raise WrongTrainingError(
                f"{loop.names[first]}: with dropout on, the gradient is not that of single "
                f"samples: {_DRAWN_AGAIN}"
            )
        self.worst = max(self.worst, worst)
        self.checked.append("so it is with dropout on")

    def _compare_changes(self, samples: Samples, taken: StepEffects) -> None:
        """Find parameters that do not move and should, and those that move and should not."""
        refuse_changes(self.loop, taken)
        self.checked.append("frozen parameters stay")
        resting = find_resting(self.loop)
        if resting is None:
            self.checked.append("weights change")
        else:
            self.unchecked["weights change"] = f"the learning rate of {resting} is 0"
        still = [p for p, gradient in samples.gradients.items() if not gradient.any()]
        if still:
            self.unchecked["some gradients"] = (
                f"the loss of this batch does not depend on {self.loop.names[still[0]]}"
                + (f" and {len(still) - 1} more" if len(still) > 1 else "")
            )

    def _try_noise(self, silent: StepEffects) -> None:
        if self.loop.settings.noise == 0:
            self.unchecked["noise"] = "the noise multiplier is 0"
            return
        if self.loop.settings.is_correlated:
            self.unchecked["the correlation of noise"] = "each step is looked at alone"
        first, second = (self._take(self.batch, silent=False).gradients for _ in range(2))
        drawn = compare_noise(self.loop, silent.gradients, first, second)
        self.checked.append(f"noise of the right scale, by {drawn} elements")

    def _compare_padding(self, silent: StepEffects, padding: Tensor | None) -> None:
        changed = change_padding(self.batch, padding)
        if isinstance(changed, str):
            self.unchecked["padding"] = changed
            return
        first, _ = find_difference(self._take(changed).gradients, silent.gradients, self.limit)
        if first is not None:
            raise WrongTrainingError(
                f"{self.loop.names[first]}: its gradient depends on padded tokens; give the model "
                "the attention mask, and labels of -100 at padding"
            )
        self.checked.append("padding changes nothing")

    def _try_empty(self) -> None:
        """Take a step on a batch without samples, which Poisson sampling draws at times."""
        has_parts = self.loop.settings.has_parts  # one sample stands for a batch without
        try:
            empty = self.batch.take([0] if has_parts else [])
            taken = self.loop.take(empty, silent=True, is_empty=has_parts)
        except Exception as error:  # noqa: BLE001 (any model may fail in any way)
            said = f": {error}" if not has_parts or is_own(error) else ""
            self.unchecked["empty batch"] = f"not supported: {type(error).__name__}{said}"
            return
        if taken is None:
            self.unchecked["empty batch"] = (
                "the step skips it, which reveals that it is empty; take a step of noise alone"
            )
            return
        for parameter, gradient in taken.gradients.items():
            if gradient.any():
                raise WrongTrainingError(
                    f"{self.loop.names[parameter]}: a batch without samples has a gradient"
                )
        self.checked.append("an empty batch contributes nothing")
