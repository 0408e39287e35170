"""Squared norms of the per-sample gradients of a convolution's weight, and the gradients.

The output gradient of a convolution meets a window of the input at every place. So the gradient of
a sample is ``g_b^T w_b`` as for a linear layer (``norms.linear``), where the places are the tokens,
and the window of a place is the input of one: d = c k elements of c channels and k offsets. Windows
overlap, and take k times the memory of the input; they are made for few samples at a time, or not
at all:

* Gram: entry (l, m) of the windows' Gram matrix is the sum over offsets o of the products of the
  pixels at l + o and m + o. So it is the pixels' own Gram matrix, shifted by each offset, and added
  up, one axis after the other. That takes k times fewer FLOPs than to multiply windows. A stride
  of s has s phases on each axis: offsets of one phase meet the same pixels.
* product: the gradients themselves. To convolve B samples in G groups with kernels of their own is
  to convolve one sample in B G groups; on a CPU autograd's gradient of that weight takes about as
  long as the ordinary one. A GPU is slow at many groups: there tensor cores multiply the windows of
  as many samples as the workspace holds, with a float32 result.

A transposed convolution is the same with input and output gradient exchanged.

Book-keeping keeps a gradient, as for a linear layer, where it has no more elements than the
sample's input and output gradient, without those that another layer keeps anyway.

Shape legend: B samples, C channels of the input, O of the output, L places, (...) axes of space.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dpprof.private.allocation_marks import allocates, allocates_for_its_caller
from dpprof.private.norms import placement
from dpprof.private.norms.code_paths import Way
from dpprof.private.norms.linear import ON_TENSOR_CORES, GramSums, Price, WayChoice, sum_of_grams
from dpprof.private.norms.rounding import Squares, size_of
from dpprof.private.norms.tiles import (
    WORKSPACE_BYTES,
    accumulator_of,
    multiply,
    multiply_in_slices,
    samples_at_once,
    spans,
    square,
)

MOST_OFFSETS = 128
"""The most offsets whose Gram matrices are added up. The depth of that sum, over c channels, is
then at most that of a window's d = c k terms (``norms.rounding.depth_of_products``)."""


class Kernel(NamedTuple):
    """How a convolution reads its input."""

    shape: tuple[int, ...]  # the weight's: (O, C / groups, ...)
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # how many zeros are on both sides of each axis of space
    dilation: tuple[int, ...]
    groups: int

    @property
    def width(self) -> int:
        """The elements of a window that one output channel meets."""
        return math.prod(self.shape[1:])

    def phases(self, places: tuple[int, ...]) -> Iterator[tuple["Phase", ...]]:
        """Yield the phases of the stride, one of each axis, that the offsets have."""
        axes = []
        for size, s, d, L in zip(self.shape[2:], self.stride, self.dilation, places, strict=True):
            starts: dict[int, list[int]] = {}
            for offset in range(0, size * d, d):
                starts.setdefault(offset % s, []).append(offset // s)
            axes.append([Phase(first, s, offsets, L) for first, offsets in starts.items()])
        return itertools.product(*axes)


class Phase(NamedTuple):
    """Every s-th pixel of an axis, and the offsets that meet these."""

    first: int
    stride: int
    starts: list[int]  # the pixel at which each offset starts
    places: int

    @property
    def pixels(self) -> int:
        """How many of these pixels there are."""
        return self.starts[-1] + self.places

    @property
    def span(self) -> slice:
        """The places of these pixels."""
        return slice(self.first, self.first + (self.pixels - 1) * self.stride + 1, self.stride)


def _pad(x: Tensor, kernel: Kernel) -> Tensor:
    if not any(kernel.padding):
        return x
    return functional.pad(x, [pad for size in reversed(kernel.padding) for pad in (size, size)])


def _take(x: Tensor, parts: Sequence[slice]) -> Tensor:
    index: Any = (..., *parts)
    part: Tensor = x[index]
    return part


def differentiate_weight(x: Tensor, g: Tensor, kernel: Kernel) -> Tensor:
    """Compute the gradient of the weight, summed over samples."""
    gradient: Tensor = torch.ops.aten.convolution_backward(
        *(g, x, g.new_empty(1).expand(kernel.shape), None, kernel.stride, kernel.padding),
        *(kernel.dilation, False, [0] * len(kernel.stride), kernel.groups),
        [False, True, False],
    )[1]
    return gradient


def differentiate_input(x: Tensor, g: Tensor, weight: Tensor, options: Sequence[Any]) -> Tensor:
    """Compute the gradient of the input.

    On a CPU oneDNN copies what it reads and writes. So it gets as many samples at a time as fit
    with their copies into one and a half workspaces: fewer are slower, and more add to the peak.

    The weight has the dtype of ``g``; the options are those of ``torch.convolution``, from
    ``stride`` on.
    """

    def differentiate(some: slice) -> Tensor:
        gradient: Tensor = torch.ops.aten.convolution_backward(
            g[some], x[some], weight, None, *options, [True, False, False]
        )[0]
        return gradient

    moved = 4 * (2 * x.numel() + g.numel()) // (3 * max(1, len(x)))
    at_once = samples_at_once(len(x), moved, 0, accumulator_of(x.dtype))
    if placement.is_cuda(x) or at_once >= len(x):
        return differentiate(slice(None))
    gradients = torch.empty_like(x)
    for some in spans(len(x), at_once):
        gradients[some] = differentiate(some)
    return gradients


def sum_weighted(x: Tensor, g: Tensor, kernel: Kernel, weights_B: Tensor) -> Tensor:
    """Compute the weighted sum of the samples' gradients, in float32 at least."""
    B, accumulator = len(x), accumulator_of(x.dtype)
    weights = weights_B.to(accumulator).view(-1, *(1,) * (x.dim() - 1))
    elements = (x.numel() + g.numel()) // max(1, B)
    at_once = B if x.dtype == accumulator else samples_at_once(B, elements, 0, accumulator)
    total: Tensor | None = None
    for some in spans(B, at_once):
        if x.numel() <= g.numel():
            operands = x[some] * weights[some], g[some].to(accumulator)
        else:
            operands = x[some].to(accumulator), g[some] * weights[some]
        summed = differentiate_weight(*operands, kernel)
        total = summed if total is None else total.add_(summed)
    assert total is not None
    return total


@allocates_for_its_caller
def sample_gradients(x: Tensor, g: Tensor, kernel: Kernel) -> Tensor:
    """Compute the per-sample gradients, (B, *weight), in float32 at least."""
    B, accumulator = len(x), accumulator_of(x.dtype)
    on_gpu = placement.is_cuda(x)
    windows = g.shape[2:].numel() * kernel.width * kernel.groups
    operands = math.prod(kernel.shape) + (x.numel() + g.numel()) // B
    differentiate = _multiply_windows if on_gpu else _differentiate_in_groups
    at_once = samples_at_once(B, windows if on_gpu else operands, 0, accumulator)
    if at_once >= B:
        return differentiate(x, g, kernel)
    gradients = x.new_empty((B, *kernel.shape), dtype=accumulator)
    for some in spans(B, at_once):
        gradients[some] = differentiate(x[some], g[some], kernel)
    return gradients


@allocates_for_its_caller
def _differentiate_in_groups(x: Tensor, g: Tensor, kernel: Kernel) -> Tensor:
    """Compute per-sample gradients as those of one sample with more groups."""
    B, accumulator = len(x), accumulator_of(x.dtype)
    joined_x, joined_g = (each.to(accumulator).reshape(1, -1, *each.shape[2:]) for each in (x, g))
    if joined_x.is_contiguous():  # PyTorch would take strides of axes of length 1 for channels last
        joined_x = joined_x.flatten().view(joined_x.shape)
    shape = (B * kernel.shape[0], *kernel.shape[1:])
    of_all = kernel._replace(shape=shape, groups=B * kernel.groups)
    return differentiate_weight(joined_x, joined_g, of_all).view(B, *kernel.shape)


@allocates_for_its_caller
def _multiply_windows(x: Tensor, g: Tensor, kernel: Kernel) -> Tensor:
    """Compute per-sample gradients from the windows of all places."""
    windows = _windows(x, kernel, g.shape[2:])
    rows = g.reshape(len(windows), kernel.shape[0] // kernel.groups, -1)
    return multiply(rows, windows.transpose(1, 2)).view(-1, *kernel.shape)


@allocates_for_its_caller
def _windows(x: Tensor, kernel: Kernel, places: tuple[int, ...]) -> Tensor:
    windows = _pad(x, kernel)
    axes = zip(kernel.shape[2:], kernel.stride, kernel.dilation, places, strict=True)
    for axis, (size, s, d, L) in enumerate(axes, start=2):
        windows = windows.unfold(axis, d * (size - 1) + 1, s).narrow(axis, 0, L)[..., ::d]
    n = len(places)
    order = [0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n)]
    return windows.permute(order).reshape(len(x) * kernel.groups, kernel.width, -1)


@allocates_for_its_caller
def project_rows(x: Tensor, g: Tensor, kernel: Kernel, u: Tensor) -> Tensor:
    """Multiply each output channel's row of the gradients, as wide as a window, by u; (B, O)."""
    exact = accumulator_of(x.dtype)
    one_channel = u.to(exact).view(1, *kernel.shape[1:]).expand(kernel.groups, *kernel.shape[1:])
    met = torch.convolution(
        *(x.to(exact), one_channel.contiguous(), None, kernel.stride, kernel.padding),
        *(kernel.dilation, False, [0] * len(kernel.stride), kernel.groups),
    )
    met = _take(met, [slice(0, L) for L in g.shape[2:]]).flatten(2)  # (B, groups, L)
    rows = g.reshape(len(x) * kernel.groups, -1, met.shape[2]).to(exact)
    return multiply(rows, met.flatten(0, 1)[:, :, None]).view(len(x), -1)


def crop(x: Tensor, g: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Kernel]:
    """Leave out input before the first output gradient, and after the last, on each axis."""
    x = _pad(x, kernel)
    axes = zip(kernel.shape[2:], kernel.stride, kernel.dilation, strict=True)
    for axis, (size, s, d) in enumerate(axes, start=2):
        places = g.ne(0).movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist() or [0]
        first, more = places[0], places[-1] - places[0]
        g = g.narrow(axis, first, more + 1)
        x = x.narrow(axis, first * s, more * s + (size - 1) * d + 1)
    return x, g, kernel._replace(padding=(0,) * len(kernel.padding))


def bound_size(x: Tensor, g: Tensor, kernel: Kernel, squared: Callable[[Tensor], Tensor]) -> Tensor:
    """Bound the squares of windows, a few for each pixel, times those of output gradients; (B,)."""
    if kernel.groups > 1:
        return _size(x, g, kernel)
    # Offsets that meet a pixel lie a common multiple of stride and dilation apart.
    axes = zip(kernel.shape[2:], kernel.stride, kernel.dilation, g.shape[2:], strict=True)
    each = math.prod(min(-(-k * math.gcd(s, d) // s), L) for k, s, d, L in axes)
    return size_of(each * squared(x), squared(g))


def product_squares(x: Tensor, g: Tensor, kernel: Kernel) -> Squares:
    """Materialise the gradients of as many samples as the workspace holds; (B,) each."""
    at_once = samples_at_once(len(x), 2 * math.prod(kernel.shape), 0, accumulator_of(x.dtype))
    parts = spans(len(x), at_once)
    squares = [square(sample_gradients(x[some], g[some], kernel)) for some in parts]
    return Squares(torch.cat(squares), None, _size(x, g, kernel))


def _size(x: Tensor, g: Tensor, kernel: Kernel) -> Tensor:
    """Multiply the squares of windows and output gradients, group by group; (B,)."""
    places, accumulator = tuple(g.shape[2:]), accumulator_of(x.dtype)
    padded = _pad(x, kernel)
    pixels = _sum_channels(padded, kernel.groups)
    of_windows = x.new_zeros((len(x), kernel.groups), dtype=accumulator)
    for phase in kernel.phases(places):
        part = _take(pixels, [axis.span for axis in phase])
        for number, axis in enumerate(phase, start=2):
            part = _add_up([part.narrow(number, start, axis.places) for start in axis.starts])
        of_windows += part.flatten(2).sum(2)
    return size_of(of_windows, _sum_channels(g, kernel.groups).flatten(2).sum(2)).sum(1)


def _sum_channels(x: Tensor, groups: int) -> Tensor:
    """Sum the squares of each group's channels; (B, groups, ...)."""
    of_groups = x.view(len(x), groups, -1, *x.shape[2:])
    norms: Tensor = torch.linalg.vector_norm(of_groups, dim=2, dtype=accumulator_of(x.dtype))
    return norms.square_()


def gram_sums(x: Tensor, g: Tensor, kernel: Kernel) -> GramSums:
    """Multiply the Gram matrices of windows by those of output gradients; of one group."""
    B, places = len(x), tuple(g.shape[2:])
    L = math.prod(places)
    at_once = samples_at_once(B, _matrices(kernel, places), 0, accumulator_of(x.dtype))
    sums = [_sum_grams(_pad(x[some], kernel), g[some], kernel) for some in spans(B, at_once)]
    return GramSums(torch.cat(sums, dim=1), kernel.width, kernel.shape[0], L * L)


@allocates("gram_matrices")
def _sum_grams(padded: Tensor, g: Tensor, kernel: Kernel) -> Tensor:
    """Sum A * B, the diagonals of both, and the squares of both; (5, B)."""
    places = tuple(g.shape[2:])
    total: Tensor | None = None
    for phase in kernel.phases(places):
        pixels = _take(padded, [axis.span for axis in phase]).flatten(2)
        sides = [axis.pixels for axis in phase]
        part = multiply_in_slices(pixels.transpose(1, 2), pixels).view(-1, *sides, *sides)
        for row, axis in enumerate(phase, start=1):
            column, L = row + len(phase), axis.places
            part = _add_up([part.narrow(row, i, L).narrow(column, i, L) for i in axis.starts])
        total = part if total is None else total.add_(part)
    assert total is not None
    rows = g.flatten(2)
    of_gradients = multiply_in_slices(rows.transpose(1, 2), rows)
    return sum_of_grams(total.reshape(of_gradients.shape), of_gradients)


@allocates_for_its_caller
def _add_up(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return total


def _matrices(kernel: Kernel, places: tuple[int, ...]) -> int:
    """Count the elements of the Gram matrices of one sample."""
    pixels = [math.prod(axis.pixels for axis in phase) for phase in kernel.phases(places)]
    return max(pixels) ** 2 + 3 * math.prod(places) ** 2


WAYS = {Way.TILED_GRAM: gram_sums, Way.TILED_PRODUCT: product_squares}


def _price_gram(kernel: Kernel, places: tuple[int, ...]) -> Price:
    """Price the Gram way for one sample."""
    p, C, *sizes = kernel.shape
    L = math.prod(places)
    flops, elements = 2 * L * L * p, L * p + (4 + sum(sizes)) * L * L
    for phase in kernel.phases(places):
        pixels = math.prod(axis.pixels for axis in phase)
        flops += 2 * pixels * pixels * C
        elements += pixels * C
    return Price(flops, elements)


def choose_way(
    x: Tensor,
    g: Tensor,
    kernel: Kernel,
    *,
    keeps: bool,
    on_tensor_cores: bool,
    becomes_sum: bool,
    kept_anyway: int = 0,
) -> WayChoice:
    """Choose the way to a convolution's norms.

    ``keeps`` says whether contributions are kept for the weighted sum, ``becomes_sum`` whether a
    kept gradient becomes the sum, and ``kept_anyway`` how many elements of a sample's input and
    output gradient are kept for other layers already.
    """
    places = tuple(g.shape[2:])
    L, d, p = math.prod(places), kernel.width, kernel.shape[0]
    operands = x[:1].numel() + g[:1].numel()
    product = Price(2 * L * d * p, operands + 2 * d * p)
    prices = {Way.TILED_PRODUCT: product.weigh(x.element_size())}
    flops = {Way.TILED_PRODUCT: product.flops}
    fits = _matrices(kernel, places) * accumulator_of(x.dtype).itemsize <= WORKSPACE_BYTES
    if kernel.groups == 1 and math.prod(kernel.shape[2:]) <= MOST_OFFSETS and fits:
        gram = _price_gram(kernel, places)
        prices[Way.TILED_GRAM] = gram.weigh(x.element_size())
        flops[Way.TILED_GRAM] = gram.flops
    way = min(prices, key=lambda name: prices[name])
    # A GPU writes a gradient and reads it twice; otherwise it reads, weighs and reads operands.
    moved = 3 * x.element_size() * operands
    is_cheaper = ON_TENSOR_CORES * 12 * d * p <= flops[way] + ON_TENSOR_CORES * moved
    is_smaller = d * p <= operands - kept_anyway
    if keeps and (becomes_sum or (is_smaller and (is_cheaper or not on_tensor_cores))):
        way = Way.KEPT
    return WayChoice(way, L, d, p, flops.get(way, product.flops), prices)
