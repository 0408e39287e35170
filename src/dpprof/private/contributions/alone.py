"""Computes gradients of single samples by themselves, where tokens cancel (``norms.rounding``).

A sample's gradient of a parameter is the sum over its uses, in float64, of those tokens alone that
have a gradient. So it is the same to the bit whatever else is in the batch: other samples, padding
on either side, other parts. Its squared norm is that of the very gradient that is added to the sum.

Shape legend: B samples, T tokens.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.contributions.contributions import (
    ChunkedProduct,
    Contribution,
    Convolution,
    Kept,
    Lookup,
    Product,
)
from dpprof.private.contributions.deferral import Deferral
from dpprof.private.contributions.sample_gradients import (
    GradientsInParts,
    SampleGradients,
    Scale,
    Shift,
)
from dpprof.private.contributions.uses import Merged, Several
from dpprof.private.norms.convolution import crop
from dpprof.private.norms.rounding import Squares, is_unsure
from dpprof.private.norms.tiles import WORKSPACE_BYTES, spans, square

Taken = Mapping[int, Sequence[Contribution]]  # a parameter's uses by some samples, by their place


class Alone:
    """The samples of a batch, by their places, that are measured and added one by one."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples
        self.squares = dict.fromkeys(samples, 0.0)  # squared norms of what was measured
        self.factors: dict[int, float] = {}  # clipping factors of those that contribute
        self._added = dict.fromkeys(samples, 0.0)

    def take(self, uses: Sequence[Contribution | Kept]) -> Taken:
        """Take these samples out of a parameter's uses."""
        return {place: [take(use, place) for use in uses] for place in self.samples}

    def measure(self, taken: Taken) -> None:
        """Add the squared norms of the gradients of one parameter."""
        for place, uses in taken.items():
            self.squares[place] += sum(float(tile.square().sum()) for _, tile in _tiles(uses))

    def add(self, taken: Taken, summed: Tensor) -> None:
        """Add the clipped gradients of one parameter to its sum."""
        for place, uses in taken.items():
            if place not in self.factors:
                continue
            for rows, tile in _tiles(uses):
                self._added[place] += float(tile.square().sum())
                part = summed[rows]
                part += (tile * self.factors[place]).view(part.shape).to(summed)

    @property
    def differ(self) -> bool:
        """Whether other gradients were added than measured."""
        squares = self.squares
        return any(abs(self._added[b] - squares[b]) > 1e-6 * squares[b] for b in self.factors)


def take(contribution: Contribution | Kept, place: int) -> Contribution:
    """Take one sample, and of its tokens those that have a gradient."""
    some = slice(place, place + 1)
    match contribution:
        case ChunkedProduct(x_BTd):
            return take(Product(x_BTd[some], contribution.gradients_of(some)), 0)
        case GradientsInParts():
            return contribution.take(place)
        case SampleGradients(gradients):
            return SampleGradients(gradients[some])
        case Convolution(x, g, kernel, transposed):
            return Convolution(*crop(x[some], g[some], kernel), transposed)
        case Product(x_BTd, g_BTp):
            factors = [x_BTd, g_BTp]
        case Lookup():
            factors = [contribution.trained_BTd]
        case Shift(g_BTp):
            factors = [g_BTp]
        case Scale():
            factors = [contribution.g_BTd]
    counts_T = functools.reduce(Tensor.logical_and, (x[place].ne(0).any(-1) for x in factors))
    parts: dict[str, Any] = {
        name: part[place][counts_T][None]
        for name, part in contribution._asdict().items()
        if isinstance(part, Tensor)
    }
    if isinstance(contribution, Shift | Scale):
        parts["beside"] = None
    taken: Contribution = contribution._replace(**parts)
    return taken


def _compute_alone(contribution: Contribution) -> Tensor:
    """Compute the gradient of a sample that was taken, in float64."""
    match contribution:
        case Product(x, g):
            return contribution.materialise(x.double(), g.double())[0]
        case Convolution(x, g, kernel):
            return contribution.materialise(x.double(), g.double(), kernel)[0]
        case Shift(g):
            return contribution.materialise(g.double())[0]
        case Scale(x, mean, rstd, g):
            mean = None if mean is None else mean.double()
            return contribution.materialise(x.double(), mean, rstd.double(), g.double())[0]
        case SampleGradients(gradients):
            return gradients[0].double()
    raise TypeError(f"{type(contribution).__name__} is not of one sample that was taken")


def _add_up(uses: Sequence[Contribution]) -> Tensor:
    return functools.reduce(Tensor.add, map(_compute_alone, uses))


def _tiles(uses: Sequence[Contribution]) -> Iterator[tuple[slice, Tensor]]:
    """Compute the sum of all uses, some rows of the parameter at a time."""
    factored = [use for use in uses if isinstance(use, Product | Lookup)]
    if len(factored) < len(uses):
        yield slice(None), _add_up(uses)
        return
    first = factored[0]
    if isinstance(first, Lookup):
        rows, columns = first.rows, first.g_BTd.shape[2]
    else:
        rows, columns = first.g_BTp.shape[2], first.x_BTd.shape[2]
        if first.transposed:
            rows, columns = columns, rows
    for some in spans(rows, max(1, WORKSPACE_BYTES // (8 * max(1, columns)))):
        yield some, functools.reduce(Tensor.add_, (_rows(use, some) for use in factored))


def _rows(use: Product | Lookup, some: slice) -> Tensor:
    if isinstance(use, Product):
        left, right = (use.x_BTd, use.g_BTp) if use.transposed else (use.g_BTp, use.x_BTd)
        return left[0, :, some].double().t() @ right[0].double()
    g_Td, ids_T = use.trained_BTd[0].double(), use.ids_BT[0]
    is_here_T = (ids_T >= some.start) & (ids_T < some.stop)
    sums = g_Td.new_zeros(some.stop - some.start, g_Td.shape[1])
    return sums.index_add_(0, ids_T[is_here_T] - some.start, g_Td[is_here_T])


WAITING = 2  # layers in which a GPU may still look for unsure samples while backward goes on


class Mending:
    """Puts gradients computed alone in the place of kept ones, while their tokens are there.

    Nothing waits for a GPU: some layers later its answer has come. Below the norm ``least``
    rounding counts for nothing. A ``deferral`` takes which samples are unsure, and nothing is
    mended.
    """

    def __init__(self, least: float, deferral: Deferral | None) -> None:
        self._least, self._deferral = least, deferral
        self._waiting: deque[tuple[Any, Tensor, Callable[[list[bool]], None]]] = deque()

    def square(self, contribution: Merged, gradients: Tensor, size_B: Tensor | None) -> Tensor:
        """Return squared norms of gradients; both are mended at the latest in ``finish``."""
        found_B = square(gradients)
        if size_B is not None:
            unsure_B = is_unsure(Squares(found_B, None, size_B), self._least)
            if self._deferral is not None:
                self._deferral.flag(unsure_B)
            else:
                self._expect(unsure_B, contribution, gradients, found_B)
        return found_B

    @torch.no_grad()
    def _expect(
        self, unsure_B: Tensor, contribution: Merged, gradients: Tensor, found_B: Tensor
    ) -> None:
        uses = contribution.uses if isinstance(contribution, Several) else (contribution,)

        def mend(flags: list[bool]) -> None:
            for place, flag in enumerate(flags):
                if flag:
                    gradient = _add_up([take(use, place) for use in uses])
                    # As ``data``: others' changes of what is kept are told by its version.
                    gradients.data[place] = gradient.view(gradients[place].shape)
                    found_B[place] = gradient.square().sum()

        if isinstance(unsure_B, FakeTensor):
            return
        if not unsure_B.is_cuda:
            mend(unsure_B.tolist())
            return
        flags_B = torch.empty(unsure_B.shape, dtype=torch.bool, pin_memory=True)
        flags_B.copy_(unsure_B, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(unsure_B.device))
        self._waiting.append((event, flags_B, mend))
        self.finish(WAITING)

    def finish(self, left: int = 0) -> None:
        """Mend all but the last layers."""
        while len(self._waiting) > left:
            event, flags_B, mend = self._waiting.popleft()
            event.synchronize()
            mend(flags_B.tolist())
