"""Finds the norms of one batch's per-sample gradients while backward runs.

``norms.rounding`` says how large rounding errors are, and for which samples they count.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.alone import Mending
from dpprof.private.contributions.contributions import (
    ChunkedProduct,
    Contribution,
    Contributions,
    Convolution,
    Direct,
    Kept,
    Lookup,
    Product,
    storage_of,
)
from dpprof.private.contributions.sample_gradients import (
    GradientsInParts,
    SampleGradients,
    may_join,
)
from dpprof.private.contributions.uses import (
    Merged,
    Several,
    SharedSquares,
    Use,
    cross,
    find_size,
    join_parts,
    merge_uses,
)
from dpprof.private.errors import BatchAxisError, UnsupportedError
from dpprof.private.norms import convolution
from dpprof.private.norms.code_paths import Watch, Way
from dpprof.private.norms.float32_products import allows_tf32, exact_products
from dpprof.private.norms.linear import (
    WAYS,
    GramSums,
    WayChoice,
    choose_way,
    gram_of_given,
    tiled_gram,
)
from dpprof.private.norms.rounding import LEAST_NORM, Squares, cross_slack, is_unsure
from dpprof.private.norms.table import inner_product, square_lookup
from dpprof.private.norms.tiles import square

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from dpprof.private.contributions.deferral import Deferral

Keep = Callable[[nn.Parameter, Kept], None]


class _Kind(NamedTuple):
    """What the figures of layers must have in common to become norms together."""

    of: type[GramSums | Squares]
    sizes: tuple[int, ...]  # the d, p and terms of ``GramSums``; empty for ``Squares``
    device: torch.device
    dtype: torch.dtype


class SampleNorms:
    """Adds up the squared norms of one batch's per-sample gradients, layer by layer.

    Each layer leaves a few figures for each sample, or the per-sample gradients of a vector. They
    become norms together, once backward is over: a GPU takes as long for a few numbers as for many.

    Args:
        losses: (B,), detached; of a batch without samples, contributions are ignored.
        reused: Parameters whose norms need all uses; ``add_reused`` adds them at the end.
        keep: Gets each contribution whose squared norms were added.
        keeps: Whether contributions are kept until the norms are known.
        shares: Whether ranks share each sum.
        loss_scale: What gradients are multiplied with.
        deferral: If not None, it takes what only values show, and nothing waits for the device.
        watch: Called with layer, way, function and its arguments, in place of the function.
        squares: If not None, it gets the squared per-sample norms of each parameter, (B,) each.
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
        shares: bool,
        loss_scale: float,
        deferral: "Deferral | None",
        watch: Watch,
        squares: dict[nn.Parameter, Tensor] | None,
        name_of: Callable[[nn.Parameter], str],
        why_once: str,
    ) -> None:
        self.plan: dict[str, WayChoice] = {}
        self._losses, self._reused = losses, reused
        self._samples = losses.shape[0]
        self._keep, self._keeps = keep, keeps
        self._becomes_sum = len(losses) == 1 and not shares
        self._watch, self._squares = watch, squares
        self._name_of, self._why_once = name_of, why_once
        self._waiting: dict[nn.Parameter, list[Use]] = defaultdict(list)
        self._seen: set[nn.Parameter] = set()
        self._figures: dict[_Kind, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        """Each layer's ``GramSums.sums_5B``, or found and size of its ``Squares``, by kind."""

        self._vectors: dict[torch.device, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        """Per-sample gradients of vectors that are kept, (B, ...)."""

        self._stored: set[StorageWeakRef] = set()  # of operands that are kept as they are
        self._added: list[Squares] = []  # what was added up already
        self._shared = SharedSquares()
        self._loss_scale = loss_scale
        self._mending = Mending(LEAST_NORM * loss_scale, deferral)

    def add(self, layer: nn.Module, contributions: Contributions) -> None:
        """Add the squared norms of a layer's contributions."""
        if not self._samples:
            return
        self._shared.forget(expects=len(contributions) > 1)
        for parameter, contribution in contributions:
            if parameter in self._reused:
                self._waiting[parameter].append(Use.note(layer, contribution))
                continue
            if parameter in self._seen:
                name = self._name_of(parameter)
                raise RuntimeError(f"{name} was used more than once, {self._why_once}")
            self._seen.add(parameter)
            self._refuse_other_axis(parameter, contribution)
            self._measure(layer, parameter, contribution)

    def add_reused(self) -> None:
        """Add the squared norms of reused parameters, once all their uses are known."""
        for parameter in list(self._waiting):
            self._add_uses(parameter, self._waiting.pop(parameter))

    @allocates("norm_samples")
    def compute(self, least: float) -> tuple[Tensor, Tensor]:
        """Compute norms, (B,), and which are unsure (``norms.rounding``), (B,), and forget all.

        Norms below ``least`` are not clipped.
        """
        if not len(self._losses):
            return self._losses, self._losses.bool()
        self._mending.finish()
        added = [*self._added, *self._square_vectors()]
        for kind, rows in self._figures.items():
            added.append(self._square_all(kind, rows))
        self._added.clear()
        self._figures.clear()
        if not added:
            raise RuntimeError("the losses depend on no trained parameter")
        device = added[0].found_B.device
        columns = [
            [part.to(device) for part in parts if part is not None]
            for parts in zip(*added, strict=True)
        ]
        found_B, slack_B, size_B = (
            functools.reduce(Tensor.add, parts) if parts else None for parts in columns
        )
        assert found_B is not None
        unsure_B = is_unsure(Squares(found_B, slack_B, size_B), least * self._loss_scale)
        # Negative inner products may exceed the squares.
        return found_B.clamp(min=0).sqrt_(), unsure_B

    def _square_vectors(self) -> Iterator[Squares]:
        """Add up the squares of all gradients of vectors that are kept."""
        for vectors in self._vectors.values():
            if self._squares is None:
                joined = [gradients.flatten(1) for _, gradients in vectors]
                yield Squares(square(torch.cat(joined, dim=1)), None, None)
                continue
            for parameter, gradients in vectors:
                found_B = square(gradients)
                self._tell(parameter, found_B)
                yield Squares(found_B, None, None)
        self._vectors.clear()

    def _square_all(self, kind: _Kind, rows: Sequence[tuple[nn.Parameter, Tensor]]) -> Squares:
        """Add up the squares of layers whose figures are of one kind."""
        stacked = torch.stack([figures for _, figures in rows])
        if kind.of is GramSums:
            squares = GramSums(stacked, *kind.sizes).square()
        else:
            squares = Squares(stacked[:, 0], None, stacked[:, 1])
        # Rounding can leave a product of Gram matrices a little below zero.
        found_LB = squares.found_B.clamp(min=0)
        for (parameter, _), found_B in zip(rows, found_LB, strict=True):
            self._tell(parameter, found_B)
        assert squares.size_B is not None
        slack_LB = squares.slack_B
        return Squares(
            found_LB.sum(0),
            None if slack_LB is None else slack_LB.sum(0),
            squares.size_B.sum(0),
        )

    def _measure(
        self,
        layer: nn.Module,
        parameter: nn.Parameter,
        contribution: Merged,
        *,
        is_whole: bool = True,
    ) -> Callable[[], Tensor]:
        """Add a contribution's squared norms; return a function that computes them, (B,).

        If it is not the parameter's whole gradient, its per-sample gradients are not kept: what is
        left of the sum may be mostly their rounding.
        """
        keeps = self._keeps and is_whole
        measured: GramSums | Squares
        match contribution:
            case Product(x_BTd, g_BTp):
                way = self._choose(parameter, contribution, g_BTp.shape[2], keeps=keeps)
                if way is Way.KEPT:
                    return self._measure_gradients(layer, Way.KEPT, parameter, contribution)
                measured = self._run(layer, way, WAYS[way], (x_BTd, g_BTp))
            case ChunkedProduct():
                keeps &= parameter not in self._reused and contribution.outlasts_gradients
                way = self._choose(parameter, contribution, contribution.p, keeps=keeps)
                if way is Way.KEPT:
                    return self._materialise_chunks(layer, parameter, contribution)
                measured = self._measure_chunks(layer, way, contribution)
            case Convolution(x, g, kernel):
                choice = convolution.choose_way(
                    *(x, g, kernel),
                    keeps=self._keeps,
                    on_tensor_cores=contribution.is_rounded,
                    becomes_sum=self._becomes_sum and self._keeps,
                    kept_anyway=sum(t[0].numel() for t in (x, g) if storage_of(t) in self._stored),
                )
                self.plan[self._name_of(parameter)] = choice
                if choice.way is Way.KEPT:
                    return self._measure_gradients(layer, Way.KEPT, parameter, contribution)
                measured = self._run(
                    layer, choice.way, convolution.WAYS[choice.way], (x, g, kernel)
                )
            case Lookup(ids_BT):
                measured = self._run(
                    layer, Way.SUMMED, square_lookup, (ids_BT, contribution.trained_BTd)
                )
            case _:
                return self._measure_gradients(layer, Way.DIRECT, parameter, contribution)
        self._keep(parameter, contribution)
        if isinstance(contribution, Convolution):
            self._stored.update(map(storage_of, contribution[:2]))
        if isinstance(measured, GramSums):
            figures, sizes = measured.sums_5B, tuple(measured[1:])
        else:
            assert measured.size_B is not None
            figures, sizes = torch.stack([measured.found_B, measured.size_B]), ()
        kind = _Kind(type(measured), sizes, figures.device, figures.dtype)
        self._figures[kind].append((parameter, figures))
        return lambda: measured.found_B.clamp(min=0)

    def _measure_chunks(
        self, layer: nn.Module, way: Way, product: ChunkedProduct
    ) -> GramSums | Squares:
        """Find squared norms of a head whose output gradients are computed in chunks."""
        if product.grams_BTT is not None:
            inputs = (product.x_BTd, product.grams_BTT, product.p)
            of_grams: GramSums = self._run(layer, Way.TILED_GRAM, gram_of_given, inputs)
            return of_grams
        parts = [self._run(layer, way, WAYS[way], part[:2]) for _, part in product.parts()]
        joined: GramSums | Squares = join_parts(parts)
        return joined

    def _materialise_chunks(
        self, layer: nn.Module, parameter: nn.Parameter, product: ChunkedProduct
    ) -> Callable[[], Tensor]:
        """Turn kept output gradients into per-sample gradients, which take no more memory."""
        assert product.release is not None
        parts, squares = [], []
        for some, part in product.parts():
            gradients = self._watch(layer, Way.KEPT, part.materialise, part[:2])
            parts.append(SampleGradients(gradients, is_own=True))
            squares.append(self._mending.square(part, gradients, find_size(part)))
            self._mending.finish()
            del part  # it has what is freed
            product.release(some)
        self._keep(parameter, GradientsInParts(tuple(parts)))
        found_B = torch.cat(squares)
        self._added.append(Squares(found_B, None, None))
        self._tell(parameter, found_B)
        return lambda: found_B

    def _choose(
        self, parameter: nn.Parameter, product: Product | ChunkedProduct, p: int, *, keeps: bool
    ) -> Way:
        """Choose the way to the norms of a product, and note it."""
        _, T, d = product.x_BTd.shape
        choice = choose_way(
            *(T, d, p, product.x_BTd.element_size()),
            keeps=keeps,
            on_tensor_cores=product.is_rounded,
            becomes_sum=self._becomes_sum and keeps,
        )
        self.plan[self._name_of(parameter)] = choice
        return choice.way

    def _run(
        self, layer: nn.Module, way: Way, function: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> Any:
        """Find squared norms with float32 products, even where training itself uses TF32."""
        with exact_products() if allows_tf32() else nullcontext():
            squares = self._watch(layer, way, function, inputs)
        if function is tiled_gram:
            self._shared.note(inputs[1], squares.sums_5B[2])
        return squares

    def _measure_gradients(
        self,
        layer: nn.Module,
        way: Way,
        parameter: nn.Parameter,
        contribution: Product | Convolution | Direct | Several,
    ) -> Callable[[], Tensor]:
        """Materialise the per-sample gradients, keep them, and add their squared norms."""
        inputs = contribution[:2] if isinstance(contribution, Product) else tuple(contribution)
        gradients = self._watch(layer, way, contribution.materialise, inputs)
        self._keep(parameter, SampleGradients(gradients, is_own=way is Way.KEPT))
        if self._keeps and may_join(parameter, gradients):
            self._vectors[gradients.device].append((parameter, gradients))
            return lambda: square(gradients)
        size_B = find_size(contribution, self._shared.square)
        if self._keeps:
            found_B, size_B = self._mending.square(contribution, gradients, size_B), None
        else:
            found_B = square(gradients)
        self._added.append(Squares(found_B, None, size_B))
        self._tell(parameter, found_B)
        return lambda: found_B

    def _refuse_other_axis(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        samples = contribution[0].shape[0]
        if samples != self._samples:
            raise BatchAxisError.of(self._name_of(parameter), samples, self._samples)

    def _add_uses(self, parameter: nn.Parameter, uses: Sequence[Use]) -> None:
        """Add the squared norms of the sum of a parameter's uses."""
        self._shared.forget(expects=True)
        for use in uses:
            use.versions.verify(self._name_of(parameter))
            self._refuse_other_axis(parameter, use.contribution)
        layer = uses[0].layer
        merged = merge_uses([use.contribution for use in uses])
        if merged is None:
            name = self._name_of(parameter)
            raise UnsupportedError(f"{name} is used in ways whose gradients cannot be combined")
        squares_of = {
            type(contribution): self._measure(
                layer, parameter, contribution, is_whole=len(merged) == 1
            )
            for contribution in merged
        }
        match merged:
            case [Product() | ChunkedProduct() as weight, Lookup() as table]:
                both = cross(partial(self._run, layer, Way.CROSSED, inner_product), weight, table)
                assert both.slack_B is not None
                assert both.size_B is not None
                T, S = table.g_BTd.shape[1], weight.x_BTd.shape[1]
                size_of_table_B = T * square(table.trained_BTd)
                slack_B = (
                    2 * both.slack_B
                    + cross_slack(squares_of[Lookup](), size_of_table_B, T)
                    + cross_slack(squares_of[type(weight)](), both.size_B, S)
                )
                self._added.append(Squares(2 * both.found_B, slack_B, None))
                self._tell(parameter, 2 * both.found_B)

    def _tell(self, parameter: nn.Parameter, found_B: Tensor) -> None:
        """Add to the squared norms of a parameter, if they are asked for."""
        squares = self._squares
        if squares is not None:
            squares[parameter] = squares[parameter] + found_B if parameter in squares else found_B
