"""Which sample each element of a tensor belongs to.

The owner of an element is the sample whose loss depends on it. Owners are an array with the axes
of the tensor, of length 1 where owners are alike along an axis.
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Owners = NDArray[np.int32]
Shape = tuple[int, ...]

FREE = -1  # the owner of what no loss depends on
MANY = -2  # the owner of what the losses of several samples depend on
_NOBODY = np.iinfo(np.int32).max  # stands for ``FREE`` where the least owner is asked for
MOST = 2**24  # the most elements whose owners are told apart


def of_first_axis(owners: Owners, axes: int) -> Owners:
    """Return the owners of a tensor of some axes by those of its first axis, (N,)."""
    return owners.reshape(-1, *(1,) * (axes - 1))


def along_first_axis(owners: Owners) -> Owners | None:
    """Return the owners of a first axis, (N,); None where they differ along another one."""
    joined = join(owners, range(1, owners.ndim)) if owners.ndim else None
    return None if joined is None else joined.reshape(-1)


def is_complete(owners: Owners) -> bool:
    """Tell whether each element has one owner."""
    return bool(owners.min(initial=0) >= 0)


def merge(parts: Iterable[Owners]) -> Owners:
    """Return the owners of what several operators use."""

    def merge_two(owners: Owners, others: Owners) -> Owners:
        if owners is others:
            return owners
        own = np.where((others == FREE) | (owners == others), owners, MANY)
        return np.where(owners == FREE, others, own).astype(np.int32)

    return reduce(merge_two, parts)


def _agree(least: Owners, most: Owners) -> Owners:
    """Return the owners of what has all owners from the least to the greatest."""
    own = np.where(least == most, most, MANY)
    return np.where(least == _NOBODY, FREE, own).astype(np.int32)


def spread(owners: Owners, axes: Sequence[int]) -> Owners:
    """Return the owners of what is repeated, or goes into all, along axes; these get length 1."""
    for axis in axes:
        if owners.shape[axis] > 1:
            least = np.where(owners == FREE, _NOBODY, owners).min(axis, keepdims=True)
            most = owners.max(axis, keepdims=True)
            owners = _agree(least, most)
    return owners


def join(owners: Owners, axes: Sequence[int]) -> Owners | None:
    """Return the owners of what may go into all along axes; None where these differ."""
    spread_out = spread(owners, axes)
    return None if ((spread_out == MANY) & (owners != MANY)).any() else spread_out


def unrepeat(owners: Owners, shape: Shape) -> Owners:
    """Return the owners of what was repeated to more, or longer, axes."""
    extra = owners.ndim - len(shape)
    longer = [axis + extra for axis, size in enumerate(shape) if size == 1]
    spread_out = spread(owners, [*range(extra), *longer])
    return spread_out.reshape(spread_out.shape[extra:])


def place(owners: Owners, axis: int, size: int, places: Sequence[int]) -> Owners:
    """Return the owners of a tensor of which an operator took some places of an axis.

    The others are free, or count as taken too where there are too many elements to tell apart.
    """
    shape = [size if number == axis else length for number, length in enumerate(owners.shape)]
    if owners.shape[axis] == 1 and math.prod(shape) > MOST:
        return owners
    filled = np.full(shape, FREE, np.int32)
    filled[(slice(None),) * axis + (list(places),)] = owners
    return filled


def whole(owners: Owners, axis: int, size: int) -> Owners:
    """Return owners with the length that an axis has."""
    shape = list(owners.shape)
    shape[axis] = size
    return np.broadcast_to(owners, shape)


def shorten(owners: Owners) -> Owners:
    """Give axes along which owners are alike length 1."""
    for axis in range(owners.ndim):
        first = owners.take([0], axis) if owners.shape[axis] > 1 else owners
        if bool((owners == first).all()):
            owners = first
    return owners


def reshape(owners: Owners, before: Shape, after: Shape) -> Owners | None:
    """Return the owners of a tensor in another shape, with its elements in order."""
    if before == after:
        return owners
    if math.prod(before) != math.prod(after) or not all(before):
        return None  # a nested one, or one without elements
    full: list[int] = []
    reshaped: list[int] = []
    i = j = 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (p := math.prod(before[start_i:i])) != (q := math.prod(after[start_j:j])):
            i, j = (i + 1, j) if p < q else (i, j + 1)
        is_alike = all(size == 1 for size in owners.shape[start_i:i])
        full += [1] * (i - start_i) if is_alike else before[start_i:i]
        reshaped += [1] * (j - start_j) if is_alike else after[start_j:j]
    if math.prod(full) > MOST:
        return None
    return shorten(np.broadcast_to(owners, full).reshape(reshaped))


def scatter(owners: Owners, indices: Sequence[Any], shape: Shape) -> Owners:
    """Return the owners of a tensor of which an index picked entries of the first axes."""
    count, width = len(indices), indices[0].ndim
    sizes = (*shape[:count], *owners.shape[width:])
    picked = np.broadcast_to(owners, (*indices[0].shape, *owners.shape[width:]))
    least, most = np.full(sizes, _NOBODY, np.int32), np.full(sizes, FREE, np.int32)
    np.minimum.at(least, tuple(indices), np.where(picked == FREE, _NOBODY, picked))
    np.maximum.at(most, tuple(indices), picked)
    return shorten(_agree(least, most))


def concatenate(parts: Sequence[Owners], axis: int, sizes: Sequence[int]) -> Owners:
    """Return the owners of what was cut along an axis into parts of some sizes."""
    used = [part for part in parts if (part != FREE).any()] or parts[:1]
    if used[0].shape[axis] == 1 and all(np.array_equal(used[0], part) for part in used):
        return used[0]
    parts = [whole(part, axis, size) for part, size in zip(parts, sizes, strict=True)]
    others = (part.take([0], axis).shape for part in parts if part.shape[axis])
    common = np.broadcast_shapes(*others)
    before, after = common[:axis], common[axis + 1 :]
    alike = [np.broadcast_to(part, (*before, part.shape[axis], *after)) for part in parts]
    return shorten(np.concatenate(alike, axis))
