"""Checks whether a user's own training is as private as its settings say.

Shape legend: B samples, T tokens.
"""

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from scipy.stats import chi2
from torch import Tensor, nn

from dpprof.private.checks.batch import TrainingBatch, count_samples, read_batch
from dpprof.private.checks.draws import StepWatcher
from dpprof.private.checks.gradients import (
    Samples,
    clip,
    compare_company,
    find_difference,
    find_part_of_all,
    norm_of,
    read_losses,
    take_alone,
    take_together,
)
from dpprof.private.checks.loop import (
    Loop,
    Mechanism,
    PrivateOptimizer,
    StepEffects,
    WrongScaleError,
    completed,
    refuse_settings,
)
from dpprof.private.checks.mistakes import (
    compare_losses,
    compare_norms,
    diagnose,
    find_shared_layer,
)
from dpprof.private.checks.padding import change_padding
from dpprof.private.engine.engine import Clipping
from dpprof.private.graph.nodes import nodes_behind
from dpprof.private.norms.complex_numbers import as_real
from dpprof.private.samples.batches import give
from dpprof.private.samples.company import COMPANY, Company, WrongTrainingError
from dpprof.private.samples.random_state import States
from dpprof.private.substitutes import substitute

_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}
"""The largest error that rounding may cause, by dtype."""

_LIMIT_OF_16_BITS = 0.05

_FALSE_ALARM = 1e-12
"""The probability that right noise is called wrong, for each parameter."""

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


def check(
    model: nn.Module,
    loss: Callable[..., Any],
    batch: Any,
    private: PrivateOptimizer | Clipping | Mechanism,
    *,
    step: Callable[..., Any] | None = None,
    samples: Sequence[Any] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    padding: Tensor | None = None,
    tolerance: float | None = None,
) -> Checked:
    """Check one's own private training on one batch, and name the first thing that is wrong.

    A step's gradient without noise is compared with the clipped gradients of single samples, each
    in a batch of its own through ordinary autograd. A loss may draw numbers: every step, and every
    sample alone, gets those that were drawn for the batch. A sample's loss must stay the same
    beside others, in another order and at its own length (``samples.company``). Then it is checked
    that every trained parameter is in the optimizer, moves, and gets noise of the right scale; that
    frozen ones stay; that padding and an empty batch contribute nothing. Dropout is off, but for
    one comparison with the gradient of each sample's loss in the whole batch, with the same random
    numbers. Everything is restored afterwards: parameters, gradients, the optimizer's state,
    generators; no accountant counts. It costs B + 12 steps at most, B + 2 more with dropout, the
    forward passes of 16 batches, and of 20 more with draws; and the memory of B + 6 gradients and
    of two copies of the parameters and the optimizer's state.

    Args:
        model: The model that is trained, as the loop has it: plain, with adapters, or wrapped by
            Opacus.
        loss: Computes from ``(model, *batch)`` what the loop differentiates: one loss a sample,
            (B,); the mean of them; or, in ghost clipping, the loss of Opacus's criterion.
        batch: As the data loader hands it out, with at least two samples. Mappings are given by
            name, lists and tuples by position, where the loss takes them so, and all else as one
            argument. Inside, tensors, arrays and lists with one entry for each sample are split by
            samples; the rest belongs to all of them.
        private: dpprof's ``NoisyOptimizer`` or the optimizer of ``make_private``, Opacus's
            optimizer, a ``Clipping`` without either, whose optimizer and noise then stay unchecked,
            or a ``Mechanism`` that describes a loop by hand.
        step: One whole step on ``batch``: clear gradients, forward, backward, step, and no
            scheduler. By default the step of a loop with ``loss`` and ``private``.
        samples: Samples of the dataset, of different lengths, which are collated together, each
            alone and in parts. Without them, rows are cut from the batch, and each to its own
            length where the batch has a mask.
        collate: Makes a batch of some, as the data loader's ``collate_fn``.
        padding: (B, T) bool, True at tokens that must not matter. By default the zeros of a mask
            of 0 and 1 in the batch.
        tolerance: Largest relative error of a gradient; by default 1e-6 in float64, 1e-2 in float32
            and 5e-2 where something computes in 16 bits.

    Raises:
        WrongTrainingError: Something is wrong. The message names the first such thing, and nothing
            of single samples; what is known of those is in ``details``, and private.
        ValueError: There are fewer than two samples, a list of the batch may be read in two ways,
            the loss or the step draws what cannot be repeated, or an argument is invalid.
        TypeError: ``private`` is of another type.

    Guarantee: on this batch the gradient before noise is within the tolerance that of the
    definition, and right noise is called wrong with a probability below 1e-11 a parameter. Limits:
    one batch shows a bug; it does not prove that there is none. Sampling, accounting and the
    quality of random numbers are not looked at; adaptive clipping is refused.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping, NoisyOptimizer
        >>> from dpprof.private import check
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = NoisyOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     BookKeeping(model, max_grad_norm=1.0),
        ...     noise_multiplier=1.0,
        ...     expected_batch_size=4,
        ... )
        >>> def loss(model, inputs, targets):
        ...     return (model(inputs) - targets).square().mean(1)
        >>> found = check(model, loss, (torch.randn(4, 3), torch.randn(4, 2)), optimizer)
        >>> found.samples, found.parameters, found.unchecked
        (4, 2, {'padding': 'the batch has no mask of 0 and 1; give the places as padding'})
    """
    if bool(samples) != (collate is not None):
        raise ValueError("give samples and collate together: collate makes a batch of some samples")
    clipping = getattr(private, "clipping", private)
    if isinstance(clipping, Clipping) and clipping.ranks.is_sharded:
        raise ValueError("check needs whole parameters: check the model before fully_shard")
    if isinstance(private, Clipping):
        if step is not None:
            raise ValueError("step makes the steps of an optimizer; give that as private")
        with completed(private, model) as optimizer:
            checked = check(
                *(model, loss, batch, optimizer),
                samples=samples,
                collate=collate,
                padding=padding,
                tolerance=tolerance,
            )
        why = "a Clipping has none; give the optimizer that adds the noise"
        return checked._replace(unchecked={"optimizer": why} | checked.unchecked)
    loop_batch = read_batch(batch, loss, model)
    loop = Loop(model, loss, private, step)
    return _Check(loop, loop_batch, tolerance, samples, collate).run(padding)


@dataclass
class _Check:
    """One check and its results so far."""

    loop: Loop
    batch: TrainingBatch
    tolerance: float | None
    samples: Sequence[Any] = ()
    collate: Callable[[list[Any]], Any] | None = None
    limit: float = 0.0
    worst: float = 0.0
    is_random: bool = False
    is_each: bool = False
    """Whether the loss function returns one loss for each sample."""

    hides_layers: bool = False
    checked: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)

    def run(self, padding: Tensor | None) -> Checked:
        loop = self.loop
        refuse_settings(loop)
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
            samples = self._take_samples()
            self._compare_company()
            taken = self._compare_gradients(samples)
            self._compare_with_dropout()
            self._find_untrained(samples, taken)
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
        loop, batch, collate = self.loop, self.batch, self.collate
        if not self.is_each:
            self.unchecked[COMPANY] = "loss does not return one loss for each sample"
            return

        def compute(value: Any) -> Any:
            args, named = give(loop.loss, value, model)
            return loop.loss(model, *args, **named)

        def compute_cut(tree: Any) -> Any:
            return batch.of_tree(tree).call(loop.loss, model)

        def gather(places: Sequence[int]) -> Any:
            assert collate is not None
            return collate([self.samples[number] for number in places])

        def cut(places: Sequence[int]) -> Any:
            return batch.take(places).tree

        assert loop.others is not None
        states = States(loop.others)
        with loop.plain() as model, states.restored():
            if collate is None:
                company = Company(model, compute_cut, cut, batch.samples, collates=False)
            else:
                company = Company(model, compute, gather, len(self.samples))
            problems = company.compare(states)
        if problems:
            self.unchecked[COMPANY] = "; ".join(problems)
        else:
            self.checked.append(COMPANY)

    def _compare_losses(self, samples: Samples, *, are_alone: bool = True) -> None:
        """Compare the batch's losses with those of its samples alone."""
        count = self.batch.samples
        watch = StepWatcher(silent=False)
        with self.loop.plain() as model, watch, self.loop.drawing():
            value = self.batch.call(self.loop.loss, model)
            losses = read_losses(value, count)
            names = [type(node).__name__ for node in nodes_behind(losses)]
            self.hides_layers = "CheckpointFunctionBackward" in names
            gradients = self.loop.differentiate(losses)
        losses = losses.detach()
        self._refuse_other_loss(value)
        self.limit = self._limit(losses, in_16_bits=watch.in_16_bits)
        if not samples.losses_B.isfinite().all():
            raise WrongTrainingError("the loss of a sample is not finite")
        if not are_alone:
            return
        if losses.dim() or not self.loop.by_hand:
            averages = self.loop.averages
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

    def _refuse_other_loss(self, value: Any) -> None:
        if isinstance(value, DPTensorFastGradientClipping):
            if type(value) is not DPTensorFastGradientClipping:
                raise TypeError("adaptive clipping cannot be checked: its bound moves each step")
            return
        private = self.loop.private
        if isinstance(private, DPOptimizerFastGradientClipping) and not self.loop.by_hand:
            raise WrongTrainingError(
                "the loss is not that of the criterion that Opacus wrapped for ghost clipping, so "
                "no sample's gradient is clipped"
            )

    def _limit(self, losses: Tensor, *, in_16_bits: bool) -> float:
        if self.tolerance is not None:
            return self.tolerance
        dtypes = [losses.dtype, *(p.dtype.to_real() for p in self.loop.trained)]
        limit = max(_LIMITS.get(dtype, _LIMIT_OF_16_BITS) for dtype in dtypes)
        return _LIMIT_OF_16_BITS if in_16_bits else limit

    def _take(self, batch: TrainingBatch, *, silent: bool = True, times: int = 1) -> StepEffects:
        try:
            taken = self.loop.take(batch, silent=silent, times=times)
        except WrongTrainingError:
            raise
        except Exception as error:  # noqa: BLE001 (any step may fail in any way)
            shared = find_shared_layer(self.loop, self.batch)
            said = f": {error}" if _is_own(error) else ""
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
            self.limit = _LIMIT_OF_16_BITS  # the loop may compute otherwise than loss
        self._compare(samples, taken)
        norms_B = samples.norms(loop.trained)
        bound = math.hypot(*(limit for _, limit in loop.groups))
        if isinstance(loop.private, Mechanism):
            if norms_B.min() >= bound:
                self.unchecked["scale of the loss"] = "every sample of the batch is clipped"
            if norms_B.max() <= bound:
                self.unchecked["clipping"] = "no sample of the batch is clipped"
        else:
            with loop.bounds_times(float(norms_B.topk(2).values.mean()) / bound):
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
        expected = clip(samples, loop.groups, loop.divisor, stability=loop.stability)
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
            f"{loop.divisor:g}",
            f"the error is {float((gradient - expected[first]).norm()):.2g}, and the gradient's "
            f"norm {float(expected[first].norm()):.2g}",
        )

    def _compare_norms(self, samples: Samples, taken: StepEffects, reason: str) -> None:
        """Compare the norms that a clipping found, unless a step by hand splits the batch."""
        if self.loop.clipping is not None and not self.loop.by_hand:
            compare_norms(self.loop, samples, taken.squares, self.limit, reason)

    def _compare_with_dropout(self) -> None:
        """Compare once more as training runs, with the same random numbers on both sides."""
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
        self._compare_norms(samples, taken, _DRAWN_AGAIN)
        expected = clip(samples, loop.groups, loop.divisor, stability=loop.stability)
        first, worst = find_difference(taken.gradients, expected, self.limit)
        if first is not None:
            raise WrongTrainingError(
                f"{loop.names[first]}: with dropout on, the gradient is not that of single "
                f"samples: {_DRAWN_AGAIN}"
            )
        self.worst = max(self.worst, worst)
        self.checked.append("so it is with dropout on")

    def _find_untrained(self, samples: Samples, taken: StepEffects) -> None:
        """Find parameters that do not move and should, and those that move and should not."""
        loop = self.loop
        for parameter, name in loop.names.items():
            if not parameter.requires_grad and parameter in taken.moved:
                raise WrongTrainingError(f"{name} is frozen, and a step changes it")
        self.checked.append("frozen parameters stay")
        rates = {p: group["lr"] for group in loop.optimizer.param_groups for p in group["params"]}
        for parameter in loop.trained:
            rate, name = float(rates[parameter]), loop.names[parameter]
            if rate == 0:
                self.unchecked["weights change"] = f"the learning rate of {name} is 0"
            size = rate * float(taken.gradients[parameter].abs().max())
            least = 4 * torch.finfo(parameter.dtype).eps * float(parameter.detach().abs().max())
            if size > least and parameter not in taken.moved:
                raise WrongTrainingError(f"{name}: a step does not change it")
        if "weights change" not in self.unchecked:
            self.checked.append("weights change")
        still = [
            parameter for parameter, gradient in samples.gradients.items() if not gradient.any()
        ]
        if still:
            self.unchecked["some gradients"] = (
                f"the loss of this batch does not depend on {loop.names[still[0]]}"
                + (f" and {len(still) - 1} more" if len(still) > 1 else "")
            )

    def _try_noise(self, silent: StepEffects) -> None:
        """Compare the variance of each parameter's noise with its scale, by a chi-squared test."""
        if self.loop.noise == 0:
            self.unchecked["noise"] = "the noise multiplier is 0"
            return
        first, second = (self._take(self.batch, silent=False).gradients for _ in range(2))
        loop, drawn = self.loop, 0
        for parameter in loop.trained:
            name, base = loop.names[parameter], silent.gradients[parameter]
            noise = as_real(first[parameter] - base).double()
            if not noise.any():
                raise WrongTrainingError(f"{name} gets no noise")
            if torch.equal(first[parameter], second[parameter]):
                raise WrongTrainingError(f"{name} gets the same noise in every step")
            count = noise.numel()
            low, high = chi2.ppf([_FALSE_ALARM / 2, 1 - _FALSE_ALARM / 2], count) / count
            rounding = 2 * torch.finfo(parameter.dtype).eps * (float(base.abs().max()) + loop.noise)
            deviation = math.sqrt(float(noise.square().mean()))
            least, most = (math.sqrt(ratio) * loop.noise for ratio in (low, high))
            if not least - rounding <= deviation <= most + rounding:
                raise WrongTrainingError(
                    f"{name}: the noise has a standard deviation of {deviation:.4g}, and noise "
                    f"multiplier times bound over the expected batch size is {loop.noise:.4g}"
                )
            drawn += count
        self.checked.append(f"noise of the right scale, by {drawn} elements")

    def _compare_padding(self, silent: StepEffects, padding: Tensor | None) -> None:
        """Change padded tokens, and compare the gradients."""
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
        has_parts = self.loop.has_parts  # one sample stands for a batch without
        try:
            empty = self.batch.take([0] if has_parts else [])
            taken = self.loop.take(empty, silent=True, is_empty=has_parts)
        except Exception as error:  # noqa: BLE001 (any model may fail in any way)
            said = f": {error}" if not has_parts or _is_own(error) else ""
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


def _is_own(error: Exception) -> bool:
    """Tell whether dpprof raised an error: others may quote samples, such as a label."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("dpprof.")
