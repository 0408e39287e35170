"""What contributes to gradients of vectors, and per-sample gradients themselves.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dpprof.private.allocation_marks import allocates_for_its_caller
from dpprof.private.norms import placement
from dpprof.private.norms.scale import scale_gradients
from dpprof.private.norms.tiles import REDUCED_SLICE, accumulator_of, spans


class BesideScale:
    """What is computed together with the per-sample gradients of a scale, and maybe a shift."""

    def __init__(self, *, is_shifted: bool) -> None:
        self.is_shifted = is_shifted
        self.gradients: Tensor | None = None  # of the shift, if computed with the scale's
        self.squares_B: Tensor | None = None  # of all terms that were added up, if known


class Shift(NamedTuple):
    """The use of a vector that is added to every token, (p,)."""

    g_BTp: Tensor
    beside: BesideScale | None = None  # shared with the scale of the same layer, if there is one

    def materialise(self, g_BTp: Tensor, beside: BesideScale | None = None) -> Tensor:
        """Compute the per-sample gradients; (B, p)."""
        if beside is not None and beside.gradients is not None:
            gradients, beside.gradients = beside.gradients, None
            return gradients
        return g_BTp.sum(1, dtype=accumulator_of(g_BTp.dtype))


class Scale(NamedTuple):
    """The use of a vector that scales every normalised token, (d,)."""

    x_BTd: Tensor
    mean_BT1: Tensor | None
    rstd_BT1: Tensor
    g_BTd: Tensor
    beside: BesideScale | None = None  # shared with the shift of the same layer

    def materialise(
        self,
        x_BTd: Tensor,
        mean_BT1: Tensor | None,
        rstd_BT1: Tensor,
        g_BTd: Tensor,
        beside: BesideScale | None = None,
    ) -> Tensor:
        """Compute the per-sample gradients; (B, d)."""
        is_shifted = beside is not None and beside.is_shifted
        gradients, of_shift, squares_B = scale_gradients(
            x_BTd, g_BTd, mean_BT1, rstd_BT1, shifted=is_shifted
        )
        if beside is not None:
            beside.gradients, beside.squares_B = of_shift, squares_B
        return gradients


class SampleGradients(NamedTuple):
    """The per-sample gradients themselves."""

    gradients: Tensor  # (B, *shape of the parameter)
    is_own: bool = False  # whether nothing else has the tensor, so that it may be overwritten

    @staticmethod
    def materialise(gradients: Tensor, is_own: bool = False) -> Tensor:  # noqa: ARG004 (as a field)
        """Return them."""
        return gradients

    @allocates_for_its_caller
    def sum(self, weights_B: Tensor) -> Tensor:
        """Compute the weighted sum over samples; the gradient of a single sample may become it."""
        flat = self.gradients.flatten(1)
        weights_B = weights_B.to(torch.promote_types(weights_B.dtype, flat.dtype))
        if self.is_own and len(flat) == 1 and flat.dtype == weights_B.dtype:
            return self.gradients[0].mul_(weights_B[0])
        if flat.dtype == weights_B.dtype:
            return (weights_B @ flat).view(self.gradients.shape[1:])
        summed = weights_B.new_empty(flat.shape[1])
        for some in spans(len(summed), REDUCED_SLICE**2):
            summed[some] = weights_B @ flat[:, some].to(weights_B.dtype)
        return summed.view(self.gradients.shape[1:])


class GradientsInParts(NamedTuple):
    """The per-sample gradients themselves, in tensors of some samples each."""

    parts: tuple[SampleGradients, ...]

    @allocates_for_its_caller
    def sum(self, weights_B: Tensor) -> Tensor:
        """Compute the weighted sum over samples."""
        return _add_up(part.sum(weights_B[some]) for some, part in self._spans())

    def take(self, place: int) -> SampleGradients:
        """Return the gradient of one sample."""
        some, part = next(pair for pair in self._spans() if place < pair[0].stop)
        return SampleGradients(part.gradients[place - some.start : place - some.start + 1])

    def without(self, excluded_B: Tensor) -> "GradientsInParts":
        """Return the gradients with some samples set to zero."""
        excluded_B11 = excluded_B.to(self.parts[0].gradients.device)[:, None, None]
        filled = [
            SampleGradients(part.gradients.masked_fill(excluded_B11[some], 0))
            for some, part in self._spans()
        ]
        return GradientsInParts(tuple(filled))

    def _spans(self) -> Iterator[tuple[slice, SampleGradients]]:
        """Yield the samples of each part, and the part."""
        start = 0
        for part in self.parts:
            yield slice(start, start := start + len(part.gradients)), part


@allocates_for_its_caller
def _add_up(parts: Iterable[Tensor]) -> Tensor:
    """Add parts up in the memory of the first; there is at least one."""
    return functools.reduce(Tensor.add_, parts)


def may_join(parameter: Tensor, gradients: Tensor) -> bool:
    """Tell whether per-sample gradients are worth a copy beside others: on CUDA, of a vector."""
    return parameter.dim() == 1 and placement.is_cuda(gradients)
