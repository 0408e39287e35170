"""What every way of clipping shares: layers put in place, norms found while backward runs.

Privacy unit: a sample is what the model's inputs hold at one index of their first axis, and
one element of the losses. The gradient of each sample over all trained parameters is
scaled to a norm of at most ``max_grad_norm``; a sample whose loss or norm is not finite adds
nothing. The sum of these gradients has L2 sensitivity ``max_grad_norm`` under adding or removing
one sample; ``norms.rounding`` says how much rounding may add.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.clipping.check import Checked, Losses, check
from dpprof.clipping.contributions import (
    Contribution,
    Lookup,
    Made,
    Product,
    Whole,
    leave_out,
    merge,
)
from dpprof.clipping.coverage import Coverage, refuse_data_parallel, refuse_wrapper, trained_in
from dpprof.clipping.factor import clip_factor
from dpprof.clipping.layers import Added, Forward, count_uses
from dpprof.clipping.patching import put_back, put_in_place, resting
from dpprof.clipping.rules import find_rule, refuse_mixing
from dpprof.clipping.sums import bound_of, sum_up
from dpprof.norms.code_paths import CodePath, Way
from dpprof.norms.float32_products import exact_products
from dpprof.norms.linear import WAYS
from dpprof.norms.plan import Choice, choose
from dpprof.norms.rounding import TOLERATED, Squares, cross_slack, spread
from dpprof.norms.table import slotted
from dpprof.norms.tied import inner_product
from dpprof.norms.tiles import square
from dpprof.records.births import allocates
from dpprof.spec.registry import UnsupportedError

Enter = Callable[[Any], None]
Watch = Callable[[nn.Module, CodePath, Callable[..., Any], tuple[Any, ...]], Any]
HandOver = Callable[[nn.Module, Added], None]


def _call(
    _layer: nn.Module, _way: CodePath, sampler: Callable[..., Any], inputs: tuple[Any, ...]
) -> Any:
    return sampler(*inputs)


def _say_nothing(_phase: Any) -> None:
    pass


class _Use:
    """A layer in place, and what it tells the clipping that it belongs to."""

    def __init__(self, clipping: "Clipping", layer: nn.Module) -> None:
        self._clipping = clipping
        self._layer = layer

    def hand_over(self, added: Added) -> None:
        self._clipping._take(self._layer, added)  # noqa: SLF001 (its other half)


class Totals:
    """What the layers' squared norms have come to so far; (B,) each."""

    def __init__(self) -> None:
        self.found_B: Tensor | None = None
        self.slack_B: Tensor | None = None
        self.spread_B: Tensor | None = None

    def add(self, found_B: Tensor, slack_B: Tensor | None, spread_B: Tensor | None) -> None:
        """Add a layer's."""
        self.found_B = _plus(self.found_B, found_B)
        self.slack_B = _plus(self.slack_B, slack_B)
        self.spread_B = _plus(self.spread_B, spread_B)


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total + more.to(total.device)


class Clipping(ABC):
    """Clips the gradient of each sample of a batch, for any optimizer to use.

    From here on the model's trained layers are run by rules of this package, until
    ``remove``; what they compute forward is what they computed before. A copy of the model
    (``copy.deepcopy``, pickle) is a plain model.

    Args:
        model: Each of its trained parameters sits in a layer. Frozen layers are left alone. A
            parameter may be frozen at any time; one that is thawed, added, replaced or tied
            later needs another ``Clipping``, and until then ``backward`` refuses the step.
        max_grad_norm: Bound C, positive and finite.

    Raises:
        UnsupportedError: A layer has no exact per-sample gradient, or no rule, or the model is
            wrapped for data-parallel training.
        ValueError: C is not positive and finite.

    Formal guarantees: the sum has L2 sensitivity C when one sample is added or removed
    (add/remove neighbouring batches): each sample adds at most C, for any input, whatever is
    frozen; see ``norms.rounding`` for what rounding adds to C. A sample whose loss or gradient is
    NaN or infinite adds nothing, and is counted in ``nonfinite_samples``; one whose gradient is
    zero adds zero; a batch without samples leaves no gradient. Not guaranteed: that the model
    handles each sample by itself. What mixes samples outside of the layers, or puts another axis
    first, cannot be seen here; ``check`` finds it.

    Example:
        >>> import torch
        >>> from dpprof.clipping import BookKeeping
        >>> model = torch.nn.Linear(3, 2)
        >>> clipping = BookKeeping(model, max_grad_norm=1.0)
        >>> losses_B = model(torch.ones(4, 3)).square().sum(1)
        >>> clipping.backward(losses_B)  # in place of losses_B.mean().backward()
        >>> clipping.sample_norms.shape, clipping.nonfinite_samples
        (torch.Size([4]), 0)
    """

    _why_once = "which reentrant checkpointing hides; checkpoint with use_reentrant=False"

    keeps = False
    """Whether what gradients are made of is kept until norms are known."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.sample_norms: Tensor | None = None
        """(B,) norms of the last batch's gradients, before clipping."""

        self.nonfinite_samples = 0
        """How many samples of the last batch were left out: loss or norm was not finite."""

        self.nonfinite_samples_total = 0
        """The same of all batches."""

        self.batches = 0
        """How many batches were clipped: every ``backward`` that was not refused."""

        self.plan: dict[str, Choice] = {}
        """By the name of a matrix, which way its norms went last, and why."""

        self.squares: dict[nn.Parameter, Tensor] | None = None
        """Where not None, gets the samples' squared norms by parameter, (B,) each."""

        self.computes_in_16_bits = False
        """Whether a layer of the last batch did."""

        self.watch: Watch = _call
        """Called with layer, way, function and its arguments, in place of the function."""

        self._hand_over: HandOver | None = None
        self._rests = False
        self._losses: Tensor | None = None
        self._left_out: Tensor | None = None
        self._not_finite: Tensor | None = None
        self._totals = Totals()
        self._waiting: dict[nn.Parameter, list[tuple[nn.Module, Contribution]]] = defaultdict(list)
        self._settled: set[nn.Parameter] = set()
        runs: list[tuple[nn.Module, Forward]] = []
        for layer in model.modules():
            refuse_wrapper(layer)
            refuse_mixing(layer)
            if trained_in(layer):
                runs.append((layer, find_rule(layer)(layer, _Use(self, layer))))
        self._layers = [layer for layer, _ in runs]
        self._coverage = Coverage({layer: trained_in(layer) for layer in self._layers})
        self._shared = self._coverage.look(model)
        self._uses: Counter[nn.Parameter] = Counter()
        for layer, run in runs:
            put_in_place(layer, _refusing_wrappers(run))
        self._hooks = [
            parameter.register_hook(  # type: ignore[no-untyped-call]
                partial(self._refuse_unclipped, parameter)
            )
            for parameter in self._coverage
        ]

    @property
    def max_grad_norm(self) -> float:
        """Bound C. It may change between a step and the next ``backward``."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float) -> None:
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"max_grad_norm must be positive and finite, and is {bound}")
        self._max_grad_norm = float(bound)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def check(self, losses_of: Losses, *batch: Tensor, tolerance: float | None = None) -> Checked:
        """Compare with per-sample gradients by definition, on one batch: ``clipping.check``."""
        return check(self, losses_of, *batch, tolerance=tolerance)

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is clipped as one, and to which bound."""
        return [(self.parameters, self.max_grad_norm)]

    def clips(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter's gradient is clipped here, if it is trained."""
        return parameter in self._coverage

    def name_of(self, parameter: nn.Parameter) -> str:
        """Tell a parameter's name in the model, or its shape if it is none of the model's."""
        name = self._coverage.names.get(parameter)
        return name or f"a parameter of shape {tuple(parameter.shape)}"

    def remove(self) -> None:
        """Give the model's layers back."""
        for layer in self._layers:
            put_back(layer)
        for hook in self._hooks:
            hook.remove()
        self._layers.clear()

    def backward(self, losses: Tensor, enter: Enter = _say_nothing) -> None:
        """Add the sum of clipped gradients to every trained parameter's ``.grad``.

        In place of ``loss.backward()``. Called again before gradients are cleared it adds
        up, as autograd does. ``NoisyOptimizer`` refuses to step on more than one batch: it says
        how one batch is taken in parts. If it raises, no gradient is left.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone; empty
                for a batch without samples, which adds nothing.
            enter: Called as a phase begins: ``backward``, ``clip``, ``second_backward``.

        Raises:
            ValueError: There is not one loss for each sample, in float32 or float64.
            RuntimeError: A parameter is trained that would not be clipped: it was used past its
                layer, or is not the one that was there when this was made. Or a ``.grad`` is
                there that is no clipped sum, such as the last step's.
        """
        if losses.dim() != 1:
            shape = tuple(losses.shape)
            raise ValueError(f"losses must be one for each sample, (B,), and have shape {shape}")
        if losses.dtype not in (torch.float32, torch.float64):
            # A factor that is rounded up would let a sample exceed the bound.
            raise ValueError(f"losses must be float32 or float64, and are {losses.dtype}")
        self._shared = self._coverage.look(self.model)
        self._refuse_other_gradients()
        self._losses = losses.detach()
        self._start()
        try:
            if len(losses):
                self._uses = count_uses(losses)
                self._clip(losses, enter)
                if self._not_finite is not None:
                    self.nonfinite_samples = sum(self._not_finite.tolist())
            else:
                self.sample_norms = losses.detach()
        except BaseException:
            for parameter in self._coverage:
                parameter.grad = None  # a part of a batch is no batch
            raise
        finally:
            self._losses = self._left_out = self._not_finite = None
            self._uses.clear()
            self._waiting.clear()
            self._settled.clear()
            self._totals = Totals()
        self.batches += 1
        self.nonfinite_samples_total += self.nonfinite_samples

    def _start(self) -> None:
        self.sample_norms = None
        self.nonfinite_samples = 0
        self.computes_in_16_bits = False
        self.plan = {}

    @abstractmethod
    def _clip(self, losses: Tensor, enter: Enter) -> None:
        """Leave the sum of clipped gradients; B is at least 1."""

    def _take(self, layer: nn.Module, added: Added) -> None:
        if self._hand_over is None:
            raise RuntimeError(
                "this model's gradients are clipped: call backward(losses) of its Clipping in "
                "place of loss.backward()"
            )
        # What was frozen after forward is trained no more.
        trained = [
            (parameter, contribution)
            for parameter, contribution in added
            if parameter.requires_grad
        ]
        if trained:
            self._hand_over(layer, trained)

    def _refuse_unclipped(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None or self._rests:
            return
        if self._hand_over is None:
            raise RuntimeError(
                f"autograd computed a gradient of {self.name_of(parameter)} that is not clipped; "
                "only backward(losses) of its Clipping may, or remove() that first"
            )
        raise RuntimeError(
            f"{self.name_of(parameter)} was used past its layer, in a way that clipping does "
            "not see; call the layer, or freeze the parameter"
        )

    def _refuse_other_gradients(self) -> None:
        """Refuse what is in ``.grad`` unless this clipping left it there."""
        for parameter in self._coverage:
            gradient = parameter.grad
            if gradient is None or bound_of(gradient) == self.max_grad_norm:
                continue
            if bound_of(gradient) is None and not gradient.any():
                parameter.grad = None
                continue
            raise RuntimeError(
                f"{self.name_of(parameter)} has a gradient that is no sum of this clipping, or was "
                "clipped to another bound, such as the last step's; call optimizer.zero_grad() "
                "after each step"
            )

    @contextmanager
    def _handing_over(self, to: HandOver) -> Iterator[None]:
        """Hand what layers add to a function."""
        self._hand_over = to
        try:
            yield
        finally:
            self._hand_over = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Run the model and autograd within as if nothing were clipped."""
        self._rests = True
        try:
            with resting(self._layers):
                yield
        finally:
            self._rests = False

    @contextmanager
    def as_if_never(self) -> Iterator[None]:
        """Forget within what batches leave behind: norms, counts and plan."""
        names = ("sample_norms", "nonfinite_samples", "nonfinite_samples_total", "batches", "plan")
        before = {name: getattr(self, name) for name in names}
        try:
            yield
        finally:
            vars(self).update(before, squares=None)

    def _find_norms(self, layer: nn.Module, added: Added) -> None:
        """Add up squared norms; gradients are left to later."""
        for parameter, contribution in added:
            if self._may_come_again(parameter):
                self._waiting[parameter].append((layer, contribution))
                continue
            if parameter in self._settled:
                raise RuntimeError(
                    f"{self.name_of(parameter)} was used more than once, {self._why_once}"
                )
            self._settled.add(parameter)
            self._square(layer, parameter, contribution)

    def _may_come_again(self, parameter: nn.Parameter) -> bool:
        return parameter in self._shared or self._uses[parameter] > 1

    def _square(
        self, layer: nn.Module, parameter: nn.Parameter, contribution: Contribution
    ) -> Tensor:
        """Find the squared norms of what a share adds, and add them up; (B,)."""
        self._check(parameter, contribution)
        match contribution:
            case Product(x_BTd, g_BTp):
                B, T, d = x_BTd.shape
                choice = choose(T, d, g_BTp.shape[2], x_BTd.element_size(), keeps=self.keeps)
                self.plan[self.name_of(parameter)] = choice
                if choice.way is Way.KEPT:
                    return self._square_made(layer, Way.KEPT, parameter, contribution)
                squares = self._measure(layer, choice.way, WAYS[choice.way], (x_BTd, g_BTp))
                rounded = contribution.is_rounded
            case Lookup(ids_BT):
                B, T = ids_BT.shape
                squares = self._measure(
                    layer, Way.SUMMED, slotted, (ids_BT, contribution.trained_BTd)
                )
                rounded = False
            case _:
                return self._square_made(layer, Way.MADE, parameter, contribution)
        self._keep(parameter, contribution)
        assert squares.size_B is not None
        spread_B = spread(squares.size_B, B * T, is_rounded=rounded)
        # Rounding can leave a product of Gram matrices a little below zero.
        found_B: Tensor = squares.found_B.clamp(min=0)
        self._add(parameter, found_B, squares.slack_B, spread_B)
        return found_B

    def _measure(
        self, layer: nn.Module, way: Way, function: Callable[..., Squares], inputs: tuple[Any, ...]
    ) -> Squares:
        """Find squared norms, watched, whatever precision the training's own products have."""
        with exact_products():
            found: Squares = self.watch(layer, way, function, inputs)
        return found

    def _square_made(
        self, layer: nn.Module, way: Way, parameter: nn.Parameter, contribution: Product | Made
    ) -> Tensor:
        inputs = contribution[:2] if isinstance(contribution, Product) else tuple(contribution)
        gradients = self.watch(layer, way, contribution.make, inputs)
        self._keep(parameter, Whole(gradients))
        found_B = square(gradients)
        self._add(parameter, found_B)
        return found_B

    @abstractmethod
    def _keep(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Keep what the weighted sum will be made of, unless that is computed again."""

    def _check(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        assert self._losses is not None
        first = contribution[0]
        self.computes_in_16_bits |= first.dtype in (torch.bfloat16, torch.float16)
        samples = len(first)
        if samples != len(self._losses):
            raise ValueError(
                f"{self.name_of(parameter)} saw {samples} samples where there are "
                f"{len(self._losses)} losses; every layer must see the batch first, with one entry "
                "for each sample (position ids, for example, repeated for each)"
            )

    @torch.no_grad()
    def _settle(self) -> Tensor:
        """Find norms of what was used more than once, now that all uses are known.

        Returns:
            (B,) by how much each sample's gradient is to be scaled.
        """
        for parameter in list(self._waiting):
            self._settle_shared(parameter, self._waiting.pop(parameter))
        self.sample_norms = self._settle_norms()
        return self._scale(self.sample_norms, self.max_grad_norm)

    @allocates("norm_samples")
    def _settle_norms(self) -> Tensor:
        """Tell norms that are not below the true ones but for rounding (``norms.rounding``)."""
        squares_B = self._totals.found_B
        if squares_B is None:
            raise RuntimeError("the losses depend on no trained parameter")
        squares_B = squares_B.clamp(min=0)  # cross terms may be more below zero than above
        if self._totals.slack_B is not None:
            squares_B += self._totals.slack_B
        norms_B = squares_B.sqrt_()
        if self._totals.spread_B is not None:
            least_B = self._totals.spread_B.sqrt().div_(TOLERATED[norms_B.dtype])
            norms_B = torch.maximum(norms_B, least_B)
        return norms_B

    def _scale(self, norms_B: Tensor, bound: float) -> Tensor:
        """Tell by how much samples are scaled, 0 for what is not finite, and leave that out."""
        assert self._losses is not None
        self._left_out = _not_finite(self._losses, norms_B)
        factors_B = clip_factor(norms_B, bound)
        if self._left_out is not None:
            factors_B = factors_B.masked_fill(self._left_out, 0)
            self._not_finite = _either(self._not_finite, self._left_out)
        return factors_B

    def _sum_up(
        self, parameter: nn.Parameter, contribution: Contribution, factors_B: Tensor
    ) -> None:
        """Add the weighted sum of what a share adds to ``.grad``."""
        if self._left_out is not None:
            contribution = leave_out(contribution, self._left_out)
        sum_up(parameter, contribution, factors_B, self.max_grad_norm)

    def _settle_shared(
        self, parameter: nn.Parameter, uses: Sequence[tuple[nn.Module, Contribution]]
    ) -> None:
        for _, contribution in uses:
            self._check(parameter, contribution)
        layer = uses[0][0]
        merged = merge([contribution for _, contribution in uses])
        if merged is None:
            name = self.name_of(parameter)
            raise UnsupportedError(f"{name} is used in ways that do not add up")
        found = {
            type(contribution): self._square(layer, parameter, contribution)
            for contribution in merged
        }
        match merged:
            case [Product(x_BTd, g_BTp), Lookup(ids_BT) as table]:
                e_BTd = table.trained_BTd
                crossed = (ids_BT, e_BTd, x_BTd, g_BTp)
                both = self._measure(layer, Way.CROSSED, inner_product, crossed)
                assert both.slack_B is not None
                T, S = e_BTd.shape[1], x_BTd.shape[1]
                slack_B = (
                    2 * both.slack_B
                    + cross_slack(found[Lookup], T * square(e_BTd), T)
                    + cross_slack(found[Product], square(x_BTd) * square(g_BTp), S)
                )
                self._add(parameter, 2 * both.found_B, slack_B)

    def _add(
        self,
        parameter: nn.Parameter,
        found_B: Tensor,
        slack_B: Tensor | None = None,
        spread_B: Tensor | None = None,
    ) -> None:
        self._totals.add(found_B, slack_B, spread_B)
        if self.squares is not None:
            before_B = self.squares.get(parameter)
            self.squares[parameter] = found_B if before_B is None else before_B + found_B


def _not_finite(losses_B: Tensor, norms_B: Tensor) -> Tensor | None:
    """Tell which samples are not finite; None where all are, which costs a wait for the device."""
    left_out_B = ~(norms_B.isfinite() & losses_B.to(norms_B.device).isfinite())
    if isinstance(left_out_B, FakeTensor):  # it has no elements to look at
        return None
    return left_out_B if any(left_out_B.tolist()) else None


def _either(some_B: Tensor | None, others_B: Tensor) -> Tensor:
    return others_B if some_B is None else some_B | others_B.to(some_B.device)


def _refusing_wrappers(run: Forward) -> Forward:
    def forward(*inputs: Any, **named: Any) -> Tensor:
        refuse_data_parallel()
        return run(*inputs, **named)

    return forward


@allocates("norm_samples")
def weigh(losses_B: Tensor) -> Tensor:
    """Weights with which losses are differentiated: one each; (B,)."""
    return torch.ones_like(losses_B)
