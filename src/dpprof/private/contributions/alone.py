"""Gradients of single samples by themselves, where tokens cancel (``norms.rounding``).

A sample's gradient of a parameter is the sum of its uses, in float64, from those tokens alone that
have one. So it is the same to the bit whatever else is in the batch: other samples, padding on
either side, other parts. Its squared norm is that of the very gradient that is added to the sum.

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
    GradientsInParts,
    Kept,
    Lookup,
    Merged,
    Product,
    SampleGradients,
    Scale,
    Several,
    Shift,
)
from dpprof.private.norms.convolution import crop
from dpprof.private.norms.tiles import WORKSPACE_BYTES, spans

Taken = Mapping[int, Sequence[Contribution]]
"""By sample, all uses of one parameter, of that sample alone."""


class Alone:
    """The samples of a batch that are measured and added one by one.

    Args:
        samples: Their places in the batch.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples
        self.squares = dict.fromkeys(samples, 0.0)
        """Squared norms of what was measured."""

        self.factors: dict[int, float] = {}
        """Clipping factors of those that contribute."""

        self._added = dict.fromkeys(samples, 0.0)

    def take(self, uses: Sequence[Contribution | Kept]) -> Taken:
        """Take these samples out of a parameter's uses."""
        return {at: [take(one, at) for one in uses] for at in self.samples}

    def measure(self, taken: Taken) -> None:
        """Add the squared norms of the gradients of one parameter."""
        for at, uses in taken.items():
            self.squares[at] += sum(float(tile.square().sum()) for _, tile in _tiles(uses))

    def add(self, taken: Taken, summed: Tensor) -> None:
        """Add the clipped gradients of one parameter to its sum."""
        for at, uses in taken.items():
            if at not in self.factors:
                continue
            for rows, tile in _tiles(uses):
                self._added[at] += float(tile.square().sum())
                part = summed[rows]
                part += (tile * self.factors[at]).view(part.shape).to(summed)

    @property
    def differ(self) -> bool:
        """Whether other gradients were added than measured."""
        return any(
            abs(self._added[at] - self.squares[at]) > 1e-6 * self.squares[at] for at in self.factors
        )


def take(contribution: Contribution | Kept, at: int) -> Contribution:
    """Take one sample, and of its tokens those that have a gradient."""
    some = slice(at, at + 1)
    match contribution:
        case ChunkedProduct(x_BTd):
            return take(Product(x_BTd[some], contribution.gradients_of(some)), 0)
        case GradientsInParts():
            return contribution.take(at)
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
    counts_T = functools.reduce(Tensor.logical_and, (one[at].ne(0).any(-1) for one in factors))
    parts: dict[str, Any] = {
        name: part[at][counts_T][None]
        for name, part in contribution._asdict().items()
        if isinstance(part, Tensor)
    }
    if isinstance(contribution, Shift | Scale):
        parts["beside"] = None
    taken: Contribution = contribution._replace(**parts)
    return taken


def _compute_alone(one: Contribution) -> Tensor:
    """Compute the gradient of a sample that was taken, in float64."""
    match one:
        case Product(x, g):
            return one.materialise(x.double(), g.double())[0]
        case Convolution(x, g, kernel):
            return one.materialise(x.double(), g.double(), kernel)[0]
        case Shift(g):
            return one.materialise(g.double())[0]
        case Scale(x, mean, rstd, g):
            mean = None if mean is None else mean.double()
            return one.materialise(x.double(), mean, rstd.double(), g.double())[0]
        case SampleGradients(gradients):
            return gradients[0].double()
    raise TypeError(f"{type(one).__name__} is not of one sample that was taken")


def _add_up(uses: Sequence[Contribution]) -> Tensor:
    return functools.reduce(Tensor.add, map(_compute_alone, uses))


def _tiles(uses: Sequence[Contribution]) -> Iterator[tuple[slice, Tensor]]:
    """Compute the sum of all uses, some rows of the parameter at a time."""
    factored = [one for one in uses if isinstance(one, Product | Lookup)]
    if len(factored) < len(uses):
        yield slice(None), _add_up(uses)
        return
    rows, columns = _shape(factored[0])
    for some in spans(rows, max(1, WORKSPACE_BYTES // (8 * max(1, columns)))):
        yield some, functools.reduce(Tensor.add_, (_rows(one, some) for one in factored))


def _shape(one: Product | Lookup) -> tuple[int, int]:
    if isinstance(one, Lookup):
        return one.rows, one.g_BTd.shape[2]
    p, d = one.g_BTp.shape[2], one.x_BTd.shape[2]
    return (d, p) if one.transposed else (p, d)


def _rows(one: Product | Lookup, some: slice) -> Tensor:
    """Compute some rows of the gradient of a matrix or a table."""
    if isinstance(one, Product):
        left, right = (one.x_BTd, one.g_BTp) if one.transposed else (one.g_BTp, one.x_BTd)
        return left[0, :, some].double().t() @ right[0].double()
    g_Td, ids_T = one.trained_BTd[0].double(), one.ids_BT[0]
    is_here_T = (ids_T >= some.start) & (ids_T < some.stop)
    sums = g_Td.new_zeros(some.stop - some.start, g_Td.shape[1])
    return sums.index_add_(0, ids_T[is_here_T] - some.start, g_Td[is_here_T])


WAITING = 2
"""Layers of which a GPU may still look for samples, while backward goes on."""


class Mending:
    """Puts gradients computed alone in the place of kept ones, while their tokens are there.

    A GPU is not waited for: some layers later its answer has come.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Tensor, Callable[[list[bool]], None]]] = deque()

    @torch.no_grad()
    def expect(
        self, unsure_B: Tensor, contribution: Merged, gradients: Tensor, found_B: Tensor
    ) -> None:
        """Mend per-sample gradients and their squared norms, both in place, of unsure samples."""
        uses = contribution.uses if isinstance(contribution, Several) else (contribution,)

        def mend(flags: list[bool]) -> None:
            for at in (at for at, is_unsure in enumerate(flags) if is_unsure):
                gradient = _add_up([take(one, at) for one in uses])
                gradients[at] = gradient.view(gradients[at].shape)
                found_B[at] = gradient.square().sum()

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
