"""How operators that read an index pass owners on, from what they returned to what they got.

Where samples lie on other axes than the index, it need not be read: the operator may exchange what
is one sample's. Otherwise its values say which sample's each entry is.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpprof.private.graph.nodes import kind_of, shape_of
from dpprof.private.graph.operands import Operand
from dpprof.private.graph.owners import (
    FREE,
    MOST,
    Owners,
    Shape,
    join,
    place,
    scatter,
    shorten,
    spread,
    unrepeat,
)

Index = NDArray[np.int64]


def pick(operand: Operand) -> Owners | None:
    """Some entries are picked, by indices of axes side by side or by a mask."""
    owners, indices = operand.output, operand.node._saved_indices  # noqa: SLF001
    if not owners.size:  # nothing is picked
        return None
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    first, count = indexed[0], len(indexed)
    masks = [i for i in indexed if indices[i].dtype == torch.bool and indices[i].dim() > 1]
    if indexed != list(range(first, first + count)) or (masks and count > 1):
        return spread(owners, range(owners.ndim)).reshape(-1)[:1].reshape([1] * len(operand.shape))
    if masks:
        count = indices[first].dim()
    width = 1 if masks else max(indices[axis].dim() for axis in indexed)
    axes = range(first, first + width)
    joined = join(owners, axes)
    if joined is not None:
        joined = joined.reshape(
            *joined.shape[:first], *(1,) * count, *joined.shape[first + width :]
        )
        if joined.size > 1:
            return joined  # else all of it is one sample's, and the rest is others'
    values = [operand.read(indices[axis]) for axis in indexed]
    if any(value is None for value in values):
        return joined
    places = [each for v in values for each in (v.nonzero() if v.dtype == bool else [v])]
    return _scatter_at(owners, first, np.broadcast_arrays(*places), operand.shape)


def _scatter_at(owners: Owners, first: int, indices: Any, shape: Shape) -> Owners:
    """Return the owners of a tensor of which indices picked entries of axes from ``first`` on."""
    count, width = len(indices), indices[0].ndim
    moved = np.moveaxis(owners, range(first, first + width), range(width))
    sizes = (*shape[first : first + count], *shape[:first], *shape[first + count :])
    return np.moveaxis(scatter(moved, indices, sizes), range(count), range(first, first + count))


def select(operand: Operand) -> Owners | None:
    """Entries of an axis are picked by a list of places."""
    (axis,), owners = operand.axes, operand.output
    joined = join(owners, [axis])
    if joined is not None:
        return joined
    index = operand.read(operand.node._saved_index)  # noqa: SLF001
    return (
        None if index is None else _scatter_at(owners, axis, [np.atleast_1d(index)], operand.shape)
    )


def gather(operand: Operand) -> Owners | None:
    """Each element is picked along an axis; the first elements of other axes may be all."""
    (axis,), owners = operand.axes, operand.output
    joined = join(owners, [axis])
    if joined is not None:
        for other, size in enumerate(operand.shape):
            if 1 < joined.shape[other] < size:
                joined = place(joined, other, size, range(joined.shape[other]))
        return joined
    index = _read_elements(operand)
    if index is None:
        return None
    places: list[Any] = list(np.indices(index.shape))
    places[axis] = index
    return scatter(np.broadcast_to(owners, index.shape), places, operand.shape)


def add_at(operand: Operand) -> Owners | None:
    """Entries are added, or copied, to places of an axis that a list names."""
    (axis,), owners = operand.axes, operand.output
    if not operand.position:
        return unrepeat(owners, operand.shape)
    joined = join(owners, [axis])
    if joined is not None:
        return joined
    index = operand.read(operand.node._saved_index)  # noqa: SLF001
    return None if index is None else owners.take(np.atleast_1d(index), axis)


def scatter_elements(operand: Operand) -> Owners | None:
    """Each element is added, or copied, to a place of its own along an axis."""
    (axis,), owners = operand.axes, operand.output
    if not operand.position:
        return unrepeat(owners, operand.shape)
    joined = join(owners, [axis])
    if joined is not None and shape_of(operand.node) == operand.shape:
        return joined
    index = _read_elements(operand)
    if index is None or index.shape != operand.shape:
        return None
    full = np.broadcast_to(owners, shape_of(operand.node))
    sides = [slice(None if at == axis else size) for at, size in enumerate(index.shape)]
    return shorten(np.take_along_axis(full[tuple(sides)], index, axis))


def put(operand: Operand) -> Owners | None:
    """Values are written to places that indices name, or a mask."""
    node, owners = operand.node, operand.output
    if not operand.position:
        return unrepeat(owners, operand.shape)
    if math.prod(shape_of(node)) > MOST:
        return None
    is_masked = kind_of(node) == "MaskedScatter"
    saved = [node._saved_mask] if is_masked else node._saved_indices  # noqa: SLF001
    read = [slice(None) if index is None else operand.read(index) for index in saved]
    if any(index is None for index in read):
        return None
    full = np.broadcast_to(owners, shape_of(node))
    if not is_masked:
        return unrepeat(full[tuple(read)], operand.shape)
    written = full[np.broadcast_to(np.asarray(read[0]), full.shape)]
    values = np.full(math.prod(operand.shape), FREE, np.int32)
    values[: len(written)] = written
    return shorten(values.reshape(operand.shape))


def pack(operand: Operand) -> Owners | None:
    """Steps of sequences, the longest first, are put side by side, all of a time together."""
    node = operand.node
    sizes = operand.read(node._saved_result1)  # noqa: SLF001
    if operand.position or sizes is None:
        return None
    times = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size) for size in sizes])
    order = (places, times) if node._saved_batch_first else (times, places)  # noqa: SLF001
    owners = operand.output
    rows = np.broadcast_to(owners, (len(times), *owners.shape[1:]))
    return scatter(rows, order, operand.shape)


def _read_elements(operand: Operand) -> Index | None:
    """Read an index that has a place for each element, unless these are too many."""
    index = operand.node._saved_index  # noqa: SLF001
    if max(index.numel(), math.prod(operand.shape)) > MOST:
        return None
    values: Index | None = operand.read(index)
    return values
