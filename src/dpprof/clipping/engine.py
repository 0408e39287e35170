"""What every way of clipping shares: layers put in place, norms found while backward runs.

Privacy unit: a sample is what the model's inputs hold at one index of their first axis, and
one element of the losses. The gradient of each sample over all trainable parameters is
scaled to a norm of at most ``max_grad_norm``; the sum of these gradients has L2 sensitivity
``max_grad_norm`` under adding or removing one sample.
"""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.catalogue import UnsupportedError
from dpprof.clipping.factor import clip_factor
from dpprof.clipping.layers import Added, Forward, find_rule, refuse_mixing
from dpprof.clipping.shares import Lookup, Made, Product, Share, Whole, merge
from dpprof.norms.linear import WAYS
from dpprof.norms.plan import KEPT, Choice, choose
from dpprof.norms.table import slotted
from dpprof.norms.tied import inner_product
from dpprof.norms.tiles import square

Enter = Callable[[Any], None]
Watch = Callable[[nn.Module, str, Callable[..., Any], tuple[Any, ...]], Any]
HandOver = Callable[[nn.Module, Added], Sequence[Tensor | None]]

MADE = "sample gradients"
"""The way of what is small for each sample, or has no other: it is made."""

SUMMED = "sums of rows"
"""The way of a lookup table."""

CROSSED = "cross terms"
"""The way of a matrix that is used as a table too."""


def _call(
    _layer: nn.Module, _way: str, sampler: Callable[..., Any], inputs: tuple[Any, ...]
) -> Any:
    return sampler(*inputs)


def _say_nothing(_phase: Any) -> None:
    pass


class _Use:
    """A layer in place, and what it tells the clipping that it belongs to."""

    def __init__(self, clipping: "Clipping", layer: nn.Module) -> None:
        self._clipping = clipping
        self._layer = layer

    def hand_over(self, added: Added) -> Sequence[Tensor | None]:
        return self._clipping._take(self._layer, added)  # noqa: SLF001 (its other half)


class Clipping(ABC):
    """Clips the gradient of each sample of a batch, for any optimizer to use.

    From here on the model's trainable layers are run by rules of this package, until
    ``remove``; what they compute forward is what they computed before.

    Args:
        model: Each of its trainable parameters sits in a layer. Frozen layers are left alone;
            what is frozen or thawed later needs another ``Clipping``.
        max_grad_norm: Bound C.

    Raises:
        UnsupportedError: A layer has no exact per-sample gradient, or no rule.
    """

    _why_once = "which reentrant checkpointing hides; checkpoint with use_reentrant=False"

    keeps = False
    """Whether what gradients are made of is kept until norms are known."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.sample_norms: Tensor | None = None
        """(B,) norms of the last batch's gradients, before clipping."""

        self.plan: dict[str, Choice] = {}
        """By the name of a matrix, which way its norms went last, and why."""

        self.watch: Watch = _call
        """Called with layer, way, function and its arguments, in place of the function."""

        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layers: list[nn.Module] = []
        self._forwards: Counter[nn.Module] = Counter()
        self._hand_over: HandOver | None = None
        self._differentiates = True
        self._batch = 0
        self._squares: Tensor | None = None
        self._waiting: dict[nn.Parameter, list[tuple[nn.Module, Share]]] = defaultdict(list)
        self._settled: set[nn.Parameter] = set()
        owners: Counter[nn.Parameter] = Counter()
        runs: list[tuple[nn.Module, Forward]] = []
        for layer in model.modules():
            refuse_mixing(layer)
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            owners.update(own)
            if own:
                runs.append((layer, find_rule(layer)(layer, _Use(self, layer))))
        for layer, run in runs:
            self._put_in_place(layer, run)
        self._shared = {parameter for parameter, count in owners.items() if count > 1}
        self._hooks = [
            parameter.register_hook(  # type: ignore[no-untyped-call]
                partial(self._refuse_past_layers, parameter)
            )
            for parameter in owners
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self._names if parameter.requires_grad]

    def remove(self) -> None:
        """Give the model's layers back."""
        for layer in self._layers:
            del layer.forward
        for hook in self._hooks:
            hook.remove()
        self._layers.clear()

    def backward(self, losses: Tensor, enter: Enter = _say_nothing) -> None:
        """Add the sum of clipped gradients to every trainable parameter's ``.grad``.

        In place of ``loss.backward()``. Called again before gradients are cleared it adds
        up, as autograd does: a large batch can be taken in parts.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone; empty
                for a batch without samples, which adds nothing.
            enter: Called as a phase begins: ``backward``, ``clip``, ``second_backward``.

        Raises:
            ValueError: There is not one loss for each sample, in float32 or float64.
            RuntimeError: A parameter was used past its layer, so it cannot be clipped.
        """
        if losses.dim() != 1:
            shape = tuple(losses.shape)
            raise ValueError(f"losses must be one for each sample, (B,), and have shape {shape}")
        if losses.dtype not in (torch.float32, torch.float64):
            # A factor that is rounded up would let a sample exceed the bound.
            raise ValueError(f"losses must be float32 or float64, and are {losses.dtype}")
        self._batch = len(losses)
        self._squares = None
        self.sample_norms = None
        self.plan = {}
        try:
            if self._batch:
                self._clip(losses, enter)
            else:
                self.sample_norms = losses.detach()
        finally:
            self._forwards.clear()
            self._waiting.clear()
            self._settled.clear()
            self._squares = None

    @abstractmethod
    def _clip(self, losses: Tensor, enter: Enter) -> None:
        """Leave the sum of clipped gradients; B is at least 1."""

    def _put_in_place(self, layer: nn.Module, run: Forward) -> None:
        def forward(*inputs: Any, **named: Any) -> Tensor:
            # What checkpointing computes again, inside backward, is no use of its own.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # noqa: SLF001
                self._forwards[layer] += 1
            return run(*inputs, **named)

        layer.forward = forward
        self._layers.append(layer)

    def _take(self, layer: nn.Module, added: Added) -> Sequence[Tensor | None]:
        if self._hand_over is None:
            raise RuntimeError(
                "this model's gradients are clipped: call backward(losses) of its Clipping in "
                "place of loss.backward()"
            )
        return self._hand_over(layer, added)

    def _refuse_past_layers(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None and not self._differentiates:
            raise RuntimeError(
                f"{self._names[parameter]} was used past its layer, in a way that clipping does "
                "not see; call the layer, or freeze the parameter"
            )

    @contextmanager
    def _handing_over(self, to: HandOver, *, differentiates: bool = False) -> Iterator[None]:
        """Hand what layers add to a function.

        Args:
            to: Gets each layer with what it adds.
            differentiates: Whether it returns gradients for autograd to accumulate; where
                not, any that comes has gone past the layers.
        """
        self._hand_over, self._differentiates = to, differentiates
        try:
            yield
        finally:
            self._hand_over, self._differentiates = None, True

    def _find_norms(self, layer: nn.Module, added: Added) -> Sequence[None]:
        """Add up squared norms; gradients are left to later."""
        for parameter, share in added:
            if parameter is None or share is None:
                continue
            if self._may_come_again(layer, parameter):
                self._waiting[parameter].append((layer, share))
                continue
            if parameter in self._settled:
                raise RuntimeError(
                    f"{self._names[parameter]} was used more than once, {self._why_once}"
                )
            self._settled.add(parameter)
            self._add(self._square(layer, parameter, share))
        return [None] * len(added)

    def _may_come_again(self, layer: nn.Module, parameter: nn.Parameter) -> bool:
        return parameter in self._shared or self._forwards[layer] > 1

    def _square(self, layer: nn.Module, parameter: nn.Parameter, share: Share) -> Tensor:
        """Find the squared norms of what a share adds; (B,)."""
        self._check(parameter, share)
        match share:
            case Product(x_BTd, g_BTp):
                _, T, d = x_BTd.shape
                choice = choose(T, d, g_BTp.shape[2], x_BTd.element_size(), keeps=self.keeps)
                self.plan[self._names[parameter]] = choice
                if choice.way == KEPT:
                    return self._square_made(layer, KEPT, parameter, share)
                squares = self.watch(layer, choice.way, WAYS[choice.way], (x_BTd, g_BTp))
            case Lookup(ids_BT):
                squares = self.watch(layer, SUMMED, slotted, (ids_BT, share.trained_BTd))
            case _:
                return self._square_made(layer, MADE, parameter, share)
        self._keep(parameter, share)
        return squares  # type: ignore[no-any-return]

    def _square_made(
        self, layer: nn.Module, way: str, parameter: nn.Parameter, share: Product | Made
    ) -> Tensor:
        inputs = share[:2] if isinstance(share, Product) else tuple(share)
        gradients = self.watch(layer, way, share.make, inputs)
        self._keep(parameter, Whole(gradients))
        return square(gradients)

    @abstractmethod
    def _keep(self, parameter: nn.Parameter, share: Share) -> None:
        """Keep what the weighted sum will be made of, unless that is computed again."""

    def _check(self, parameter: nn.Parameter, share: Share) -> None:
        samples = len(share[-1] if isinstance(share, Whole) else share[0])
        if samples != self._batch:
            raise ValueError(
                f"{self._names[parameter]} saw {samples} samples where there are {self._batch} "
                "losses; every layer must see the batch first, with one entry for each sample "
                "(position ids, for example, repeated for each)"
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
        return clip_factor(self.sample_norms, self.max_grad_norm)

    def _settle_norms(self) -> Tensor:
        if self._squares is None:
            raise RuntimeError("the losses depend on no trainable parameter")
        # Rounding can leave a product of Gram matrices a little below zero.
        return self._squares.clamp(min=0).sqrt()

    def _settle_shared(
        self, parameter: nn.Parameter, uses: Sequence[tuple[nn.Module, Share]]
    ) -> None:
        for _, share in uses:
            self._check(parameter, share)
        layer = uses[0][0]
        merged = merge([share for _, share in uses])
        if merged is None:
            raise UnsupportedError(f"{self._names[parameter]} is used in ways that do not add up")
        for share in merged:
            self._add(self._square(layer, parameter, share))
        for table in merged:
            for product in merged:
                if isinstance(table, Lookup) and isinstance(product, Product):
                    crossed = (table.ids_BT, table.trained_BTd, product.x_BTd, product.g_BTp)
                    self._add(2 * self.watch(layer, CROSSED, inner_product, crossed))

    def _add(self, squares_B: Tensor) -> None:
        if self._squares is None:
            self._squares = squares_B
        else:
            self._squares = self._squares + squares_B.to(self._squares.device)


def weigh(losses: Tensor, factors: Tensor | None = None) -> Tensor:
    """Weights with which losses are differentiated: ones, or each sample's factor; (B,)."""
    return torch.ones_like(losses) if factors is None else factors.to(losses)


def as_gradient(found: Tensor, parameter: nn.Parameter) -> Tensor:
    """Give a sum over samples the parameter's shape and dtype."""
    return found.view_as(parameter).to(parameter.dtype)


@torch.no_grad()
def sum_up(parameter: nn.Parameter, share: Share, factors: Tensor) -> None:
    """Add the weighted sum of what a share adds to ``.grad``."""
    gradient = as_gradient(share.sum(factors), parameter)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
