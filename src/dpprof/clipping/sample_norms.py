"""Finds the norms of one batch's per-sample gradients while backward runs.

``norms.rounding`` says how large the rounding errors of norms are, and how they are bounded.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import (
    Contribution,
    Direct,
    Lookup,
    Product,
    SampleGradients,
    Summable,
    merge_uses,
)
from dpprof.clipping.layers import Contributions
from dpprof.norms.code_paths import Watch, Way
from dpprof.norms.float32_products import exact_products
from dpprof.norms.linear import WAYS, WayChoice, choose_way
from dpprof.norms.rounding import TOLERATED, Squares, bound_spread, cross_slack
from dpprof.norms.table import inner_product, square_lookup
from dpprof.norms.tiles import square
from dpprof.records.births import allocates
from dpprof.spec.registry import UnsupportedError

Keep = Callable[[nn.Parameter, Summable], None]


class BatchAxisError(UnsupportedError, ValueError):
    """The first axis of a layer's input is not the batch."""


class SampleNorms:
    """Adds up the squared norms of one batch's per-sample gradients, layer by layer.

    Args:
        losses: (B,), detached; of a batch without samples, contributions are ignored, because they
            belong to none.
        reused: Parameters that may be used more than once. Their norms need all uses, so
            ``add_reused`` adds them at the end.
        keep: Gets each contribution whose squared norms were added.
        keeps: Whether contributions are kept until the norms are known.
        watch: Called with layer, way, function and its arguments, in place of the function.
        squares: If not None, receives the squared per-sample norms of each parameter, (B,) each.
        name_of: Names a parameter.
        why_once: Why a parameter that is not ``reused`` was expected to be used once.
    """

    def __init__(
        self,
        losses: Tensor,
        reused: Collection[nn.Parameter],
        keep: Keep,
        *,
        keeps: bool,
        watch: Watch,
        squares: dict[nn.Parameter, Tensor] | None,
        name_of: Callable[[nn.Parameter], str],
        why_once: str,
    ) -> None:
        self.totals: dict[str, Tensor] = {}
        """Sums over layers of what ``norms.rounding`` calls found, slack and spread; (B,) each."""

        self.plan: dict[str, WayChoice] = {}
        self._losses, self._reused = losses, reused
        self._keep, self._keeps = keep, keeps
        self._watch, self._squares = watch, squares
        self._name_of, self._why_once = name_of, why_once
        self._waiting: dict[nn.Parameter, list[tuple[nn.Module, Contribution]]] = defaultdict(list)
        self._seen: set[nn.Parameter] = set()

    def add(self, layer: nn.Module, contributions: Contributions) -> None:
        """Add the squared norms of a layer's contributions."""
        if not len(self._losses):
            return
        for parameter, contribution in contributions:
            if parameter in self._reused:
                self._waiting[parameter].append((layer, contribution))
                continue
            if parameter in self._seen:
                name = self._name_of(parameter)
                raise RuntimeError(f"{name} was used more than once, {self._why_once}")
            self._seen.add(parameter)
            self._square(layer, parameter, contribution)

    def add_reused(self) -> None:
        """Add the squared norms of reused parameters, once all their uses are known."""
        for parameter in list(self._waiting):
            self._add_uses(parameter, self._waiting.pop(parameter))

    @allocates("norm_samples")
    def compute(self) -> Tensor:
        """Compute norms that are too small by no more than ``norms.rounding`` allows; (B,)."""
        if not len(self._losses):
            return self._losses
        if "found" not in self.totals:
            raise RuntimeError("the losses depend on no trained parameter")
        # Negative inner products may exceed the squares.
        squares_B = self.totals["found"].clamp(min=0)
        if "slack" in self.totals:
            squares_B += self.totals["slack"]
        norms_B = squares_B.sqrt_()
        if "spread" in self.totals:
            least_B = self.totals["spread"].sqrt().div_(TOLERATED[norms_B.dtype])
            norms_B = torch.maximum(norms_B, least_B)
        return norms_B

    def _square(
        self, layer: nn.Module, parameter: nn.Parameter, contribution: Contribution
    ) -> Tensor:
        """Find a contribution's squared norms, and add them; (B,)."""
        self._check(parameter, contribution)
        match contribution:
            case Product(x_BTd, g_BTp):
                _, T, d = x_BTd.shape
                choice = choose_way(T, d, g_BTp.shape[2], x_BTd.element_size(), keeps=self._keeps)
                self.plan[self._name_of(parameter)] = choice
                if choice.way is Way.KEPT:
                    return self._square_gradients(layer, Way.KEPT, parameter, contribution)
                squares = self._measure(layer, choice.way, WAYS[choice.way], (x_BTd, g_BTp))
                rounded = contribution.is_rounded
            case Lookup(ids_BT):
                squares = self._measure(
                    layer, Way.SUMMED, square_lookup, (ids_BT, contribution.trained_BTd)
                )
                rounded = False
            case _:
                return self._square_gradients(layer, Way.DIRECT, parameter, contribution)
        self._keep(parameter, contribution)
        assert squares.size_B is not None
        spread_B = bound_spread(squares.size_B, is_rounded=rounded)
        # Rounding can leave a product of Gram matrices a little below zero.
        found_B: Tensor = squares.found_B.clamp(min=0)
        self._add(parameter, found_B, squares.slack_B, spread_B)
        return found_B

    def _measure(
        self, layer: nn.Module, way: Way, function: Callable[..., Squares], inputs: tuple[Any, ...]
    ) -> Squares:
        """Find squared norms with float32 products, even where training itself uses TF32."""
        with exact_products():
            squares: Squares = self._watch(layer, way, function, inputs)
        return squares

    def _square_gradients(
        self, layer: nn.Module, way: Way, parameter: nn.Parameter, contribution: Product | Direct
    ) -> Tensor:
        """Materialise the per-sample gradients, keep them, and add their squared norms; (B,)."""
        inputs = contribution[:2] if isinstance(contribution, Product) else tuple(contribution)
        gradients = self._watch(layer, way, contribution.materialise, inputs)
        self._keep(parameter, SampleGradients(gradients))
        found_B = square(gradients)
        self._add(parameter, found_B)
        return found_B

    def _check(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        first = contribution[0]
        if len(first) != len(self._losses):
            raise BatchAxisError(
                f"{self._name_of(parameter)} saw {len(first)} samples, and there are "
                f"{len(self._losses)} losses; the first axis of every layer's input must be the "
                "batch, with one entry for each sample (repeat position ids, for example; OPT's "
                "blocks join samples and tokens before fc1, so freeze what follows)"
            )

    def _add_uses(
        self, parameter: nn.Parameter, uses: Sequence[tuple[nn.Module, Contribution]]
    ) -> None:
        """Add the squared norms of the sum of a parameter's uses."""
        for _, contribution in uses:
            self._check(parameter, contribution)
        layer = uses[0][0]
        merged = merge_uses([contribution for _, contribution in uses])
        if merged is None:
            name = self._name_of(parameter)
            raise UnsupportedError(f"{name} is used in ways whose gradients cannot be combined")
        found = {
            type(contribution): self._square(layer, parameter, contribution)
            for contribution in merged
        }
        match merged:
            case [Product(x_BTd, g_BTp), Lookup(ids_BT) as table]:
                e_BTd = table.trained_BTd
                operands = (ids_BT, e_BTd, x_BTd, g_BTp)
                both = self._measure(layer, Way.CROSSED, inner_product, operands)
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
        for name, more_B in (("found", found_B), ("slack", slack_B), ("spread", spread_B)):
            if more_B is not None:
                total_B = self.totals.get(name)
                self.totals[name] = (
                    more_B if total_B is None else total_B + more_B.to(total_B.device)
                )
        squares = self._squares
        if squares is not None:
            squares[parameter] = squares[parameter] + found_B if parameter in squares else found_B
