"""Merges several uses of a parameter, and finds what rounding of their gradients is relative to.

Shape legend: B samples, T tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpprof.private.contributions.contributions import (
    ChunkedProduct,
    Contribution,
    Convolution,
    Direct,
    Lookup,
    Product,
    Versions,
    storage_of,
)
from dpprof.private.contributions.sample_gradients import BesideScale, SampleGradients, Scale, Shift
from dpprof.private.norms import placement
from dpprof.private.norms.convolution import bound_size
from dpprof.private.norms.linear import GramSums
from dpprof.private.norms.rounding import Squares, size_of
from dpprof.private.norms.tiles import square


class Use(NamedTuple):
    """A use of a parameter that waits for its others."""

    layer: nn.Module
    contribution: Contribution
    versions: Versions

    @classmethod
    def note(cls, layer: nn.Module, contribution: Contribution) -> "Use":
        """Return a use, of which a later change will be seen."""
        return cls(layer, contribution, Versions(contribution))


class Several(NamedTuple):
    """Several uses of one parameter, whose per-sample gradients are materialised and added."""

    uses: tuple[Direct | Convolution, ...]

    @staticmethod
    def materialise(uses: "tuple[Direct | Convolution, ...]") -> Tensor:
        """Compute the per-sample gradients."""
        return torch.stack([use.materialise(*use) for use in uses]).sum(0)


Merged = Contribution | Several


def merge_uses(contributions: Sequence[Contribution]) -> list[Merged] | None:
    """Combine the contributions of several uses of one parameter; None if kinds cannot be combined.

    Several uses of a matrix, or of a table, equal one use with the tokens of all; uses of
    vectors and convolutions stay ``Several``. There is one contribution for each kind of use.
    """
    products = [use for use in contributions if isinstance(use, Product)]
    chunked = [use for use in contributions if isinstance(use, ChunkedProduct)]
    lookups = [use for use in contributions if isinstance(use, Lookup)]
    others = [use for use in contributions if isinstance(use, Direct | Convolution)]
    if (lookups and others) or (others and products):
        return None
    if chunked and (len(chunked) > 1 or products or others):
        return None
    merged: list[Merged] = [*chunked]
    if products:
        transposed = products[0].transposed and not lookups
        like = next((p for p in products if p.transposed == transposed), products[0])
        products = [p if p.transposed == transposed else p.transpose(like) for p in products]
        x, g = _join_tokens(p.x_BTd for p in products), _join_tokens(p.g_BTp for p in products)
        merged.append(Product(x, g, transposed))
    if lookups:
        padding = lookups[0].padding
        if any(use.padding != padding for use in lookups):
            lookups = [use._replace(g_BTd=use.trained_BTd, padding=-1) for use in lookups]
            padding = -1
        ids = _join_tokens(use.ids_BT for use in lookups)
        g = _join_tokens(use.g_BTd for use in lookups)
        merged.append(lookups[0]._replace(ids_BT=ids, g_BTd=g, padding=padding))
    if others:
        merged.append(others[0] if len(others) == 1 else Several(tuple(others)))
    return merged


def _join_tokens(parts: Iterable[Tensor]) -> Tensor:
    """Concatenate along tokens; (B, T, ...) each to (B, sum of T, ...)."""
    first, *rest = parts
    return torch.cat([first, *rest], dim=1) if rest else first


class SharedSquares:
    """The sums of samples' squares of tensors that the weight and bias of one layer may share."""

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}
        self._expects = True

    def forget(self, *, expects: bool) -> None:
        """Begin with a layer; ``expects`` tells whether it may ask twice for a tensor."""
        self._known.clear()
        self._expects = expects

    def note(self, tensor: Tensor, squares_B: Tensor) -> None:
        """Note the squares of a tensor."""
        if self._expects:
            self._known[_identify(tensor)] = squares_B

    def square(self, tensor: Tensor) -> Tensor:
        """Sum each sample's squares, unless they are known; (B,)."""
        key = _identify(tensor) if self._expects or not tensor.is_contiguous() else None
        if key is None:
            return square(tensor)
        if key not in self._known:
            in_order = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
            self._known[key] = square(tensor.permute(0, *in_order))
        return self._known[key]


def _identify(tensor: Tensor) -> Any:
    """Identify a sample's elements, in any order; None where they do not lie side by side."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    sides = [(size, step) for size, step in axes if size > 1]
    last = sum((size - 1) * step for size, step in sides)
    if last + 1 != tensor.numel() or not all(step for _, step in sides):
        return None
    return storage_of(tensor), tensor.storage_offset(), tensor.numel(), tensor.dtype


def find_size(contribution: Merged, squared: Callable[[Tensor], Tensor] = square) -> Tensor | None:
    """Find the ``size`` of ``norms.rounding`` of gradients that were materialised; (B,).

    It is None where no tokens are added up, or nothing is known. Vectors on CUDA have none: each
    would take several launches. ``squared`` sums each sample's squares, or knows the sums.
    """
    match contribution:
        case Several(uses):
            sizes = [size_B for size_B in map(_find_size, uses) if size_B is not None]
            return len(uses) * torch.stack(sizes).sum(0) if len(sizes) == len(uses) else None
        case SampleGradients() | Lookup() | ChunkedProduct():
            return None
        case Convolution(_, g) if g.shape[2:].numel() == 1:
            return None
        case Product(tokens) | Shift(tokens) | Scale(tokens) if tokens.shape[1] == 1:
            return None
    return _find_size(contribution, squared)


def _find_size(
    contribution: Contribution, squared: Callable[[Tensor], Tensor] = square
) -> Tensor | None:
    match contribution:
        case Product(x_BTd, g_BTp):
            return size_of(squared(x_BTd), squared(g_BTp))
        case Convolution(x, g, kernel):
            return bound_size(x, g, kernel, squared)
        case SampleGradients(gradients):
            return square(gradients)
        case Shift(g_BTp) if not placement.is_cuda(g_BTp):
            return g_BTp.shape[1] * squared(g_BTp)
        case Scale(x_BTd, beside=BesideScale(squares_B=Tensor() as squares_B)):
            return x_BTd.shape[1] * squares_B
    return None


def cross(
    multiply: Callable[[tuple[Tensor, ...]], Squares],
    weight: Product | ChunkedProduct,
    table: Lookup,
) -> Squares:
    """Find the inner product of both gradients of each sample; the size is the weight's.

    ``multiply`` computes it from ids and gradients of the table, inputs and output gradients.
    """
    ids_BT, e_BTd = table.ids_BT, table.trained_BTd
    whole = slice(0, len(ids_BT))
    parts = [(whole, weight)] if isinstance(weight, Product) else weight.parts()
    crossed = []
    for some, (x_BTd, g_BTp, _) in parts:
        product = multiply((ids_BT[some], e_BTd[some], x_BTd, g_BTp))
        crossed.append(product._replace(size_B=size_of(square(x_BTd), square(g_BTp))))
    joined: Squares = join_parts(crossed)
    return joined


def join_parts(parts: Sequence[Any]) -> Any:
    """Join what was measured of parts of the samples."""
    first = parts[0]
    if isinstance(first, GramSums):
        return first._replace(sums_5B=torch.cat([part.sums_5B for part in parts], dim=-1))
    columns = zip(*parts, strict=True)
    return type(first)(*(None if column[0] is None else torch.cat(column) for column in columns))
