"""How the record of a training grows with the blocks of its model, and with the batch.

Records of n, n + 1 and n + 2 blocks must nest: the second has the atoms of the first and, at some
places, further ones; the third has these further atoms twice, each time those of the next block. By
induction a record of any number of blocks has them once for each block. Sizes must be affine in the
number of blocks. What does not follow this is refused, and the whole model has to be traced.

Between two batches whose records have the same atoms, sizes are affine in the batch too, if a third
batch confirms it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpprof.predict.memory.atoms import (
    Atom,
    Outline,
    Place,
    Recording,
    SettledAtom,
    Vocabulary,
    Writer,
    find_workspaces,
    read_atoms,
)
from dpprof.predict.memory.events import Allocated, Event, Freed, Launched
from dpprof.predict.memory.footprint import Footprint
from dpprof.subjects.models.blocks import Blocks, NotAlikeError

Integers = npt.NDArray[np.int64]


class Sizes(NamedTuple):
    """All sizes of a pattern for one batch."""

    least: Integers
    """With the smallest number of blocks that was traced."""

    growth: Integers
    """With each further block."""

    def of(self, further: int) -> Integers:
        """Return the sizes with so many further blocks."""
        return self.least + further * self.growth


class Pattern:
    """How records of one training grow with its blocks.

    Args:
        recordings: Of ``least``, ``least + 1`` and ``least + 2`` blocks.
        blocks: The container of the blocks, and ``least``.

    Raises:
        NotAlikeError: They do not nest, or a size is not affine.
    """

    def __init__(self, recordings: Sequence[Recording], blocks: Blocks) -> None:
        self._blocks = blocks
        self._like = recordings[0]
        self._vocabulary = Vocabulary()
        self._layouts: dict[int, _Layout] = {}
        few, more, most = (self._read(one, further) for further, one in enumerate(recordings))
        self._few, self._more = few, more
        self._insertions = [*_find_insertions(few, more, most), (len(few), 0)]
        self._parts: list[tuple[list[SettledAtom], list[SettledAtom]]] = []
        at = k = 0
        for plain, repeated in self._split(few, more):
            parts: tuple[list[SettledAtom], list[SettledAtom]] = [], []
            for a, b in plain:
                parts[0].append(_settle(at, a, b, most[k]))
                if [2 * y - x for x, y in zip(a.sizes, b.sizes, strict=True)] != [*most[k].sizes]:
                    raise NotAlikeError("a size is not affine in the number of blocks")
                at += len(a.sizes)
                k += 1
            for number, b in enumerate(repeated):
                parts[1].append(_settle(at, b, most[k + number], most[k + len(repeated) + number]))
                at += len(b.sizes)
            k += 2 * len(repeated)
            self._parts.append(parts)
        self.sizes = self._measure(few, more)

    def _read(self, recording: Recording, further: int) -> Sequence[Atom]:
        blocks = replace(self._blocks, count=self._blocks.count + further)
        return read_atoms(recording, self._vocabulary, blocks)

    def _split(
        self, few: Sequence[Atom], more: Sequence[Atom]
    ) -> Iterator[tuple[Sequence[tuple[Atom, Atom]], Sequence[Atom]]]:
        """Yield pairs of atoms that both have, and the further ones that follow them."""
        i = j = 0
        for at, length in self._insertions:
            until = j + at - i
            yield list(zip(few[i:at], more[j:until], strict=True)), more[until : until + length]
            i, j = at, until + length

    def _measure(self, few: Sequence[Atom], more: Sequence[Atom]) -> Sizes:
        least: list[int] = []
        growth: list[int] = []
        for plain, repeated in self._split(few, more):
            for a, b in plain:
                least += a.sizes
                growth += [y - x for x, y in zip(a.sizes, b.sizes, strict=True)]
            for b in repeated:
                least += b.sizes
                growth += [0] * len(b.sizes)
        return Sizes(np.array(least, dtype=np.int64), np.array(growth, dtype=np.int64))

    def measure(self, few: Recording, more: Recording) -> Sizes:
        """Return the sizes of the same training with another batch.

        Args:
            few: Its record with the smallest number of blocks.
            more: With one more.

        Raises:
            NotAlikeError: It has other atoms.
        """
        return self._measure(
            self._read_like(few, 0, self._few), self._read_like(more, 1, self._more)
        )

    def _read_like(
        self, recording: Recording, further: int, known: Sequence[Atom]
    ) -> Sequence[Atom]:
        found = self._read(recording, further)
        if len(found) != len(known) or any(
            a[:3] != b[:3] for a, b in zip(found, known, strict=True)
        ):
            raise NotAlikeError("another batch has other atoms")
        return found

    def guess(self, more: Recording, times: float) -> Sizes:
        """Guess the sizes with another batch from one record: what holds for one must be confirmed.

        Args:
            more: Its record with one more than the smallest number of blocks.
            times: How many times as large the batch is. What each further block adds is taken to
                grow with it, or not at all where the record says so.

        Raises:
            NotAlikeError: It has other atoms.
        """
        found = self._read_like(more, 1, self._more)
        alike = self._measure(self._few, found)  # wrong but for what blocks add themselves
        shared = self.sizes.growth != 0
        same = alike.least + alike.growth == self.sizes.least + self.sizes.growth
        growth = np.where(shared & ~same, np.rint(self.sizes.growth * times), self.sizes.growth)
        growth = growth.astype(np.int64)
        return Sizes(alike.least + alike.growth - growth, growth)

    def assemble(self, count: int, sizes: Sizes) -> Recording:
        """Assemble the record of a model with so many blocks."""
        further = count - self._blocks.count
        writer = Writer(
            self._vocabulary.examples,
            replace(self._blocks, count=count),
            sizes.of(further).tolist(),
            self._like,
        )
        self._write(writer, further)
        first, first_end, steady, end = writer.marks
        marks = first, first_end, steady, end
        return self._like._replace(
            storages=writer.storages, events=writer.events, marks=marks, launches=()
        )

    def _write(self, outline: Outline, further: int) -> None:
        for plain, repeated in self._parts:
            outline.write(plain)
            for _ in range(further):
                outline.write(repeated)

    def _lay_out(self, count: int) -> "_Layout":
        """Lay out what a model with so many blocks allocates and frees."""
        if count not in self._layouts:
            outline = Outline(self._vocabulary.examples, replace(self._blocks, count=count))
            self._write(outline, count - self._blocks.count)
            self._layouts[count] = _Layout.of(outline)
        return self._layouts[count]

    def footprint(self, count: int, sizes: Sizes) -> Footprint:
        """Return what the training of a model with so many blocks allocates."""
        layout = self._lay_out(count)
        known = sizes.of(count - self._blocks.count)
        requested = dict(enumerate(known[layout.places].tolist()))
        number = len(requested)
        steps: list[list[Event]] = []
        found: dict[tuple[int, ...], list[int]] = {}
        for parts in layout.steps:
            events: list[Event] = []
            for part in parts:
                if isinstance(part, list):
                    events += part
                    continue
                launched, at = part
                shapes = tuple(known[at : at + len(launched.sizes)].tolist())
                key = id(launched), *shapes
                if key not in found:
                    found[key] = find_workspaces(launched, shapes, self._like.workspaces)
                until = number + len(found[key])
                requested |= zip(range(number, until), found[key], strict=True)
                events += map(Allocated, range(number, until))
                events += map(Freed, range(number, until))
                number = until
            steps.append(events)
        *before, step, _ = steps
        like = self._like
        return Footprint([*chain(*before)], step, requested, like.block_bytes, like.is_graph)

    def footprint_sizes(self, count: int, sizes: Sizes) -> Integers:
        """Return the sizes on which a footprint rests."""
        layout = self._lay_out(count)
        known = sizes.of(count - self._blocks.count)
        launches = [
            known[part[1] : part[1] + len(part[0].sizes)]
            for part in chain.from_iterable(layout.steps)
            if isinstance(part, tuple)
        ]
        return np.concatenate([known[layout.places], *launches])


class _Layout(NamedTuple):
    """The allocations of a model with so many blocks, without their sizes."""

    steps: list[list[list[Event] | tuple[Launched, int]]]
    """For each step, and what precedes it, events and launches of kernels in their order; with
    a launch where its sizes are."""

    places: Integers
    """Where the size of each storage is, but for those of kernels."""

    @classmethod
    def of(cls, outline: Outline) -> Self:
        """Lay out an outline."""
        steps: list[list[list[Event] | tuple[Launched, int]]] = [[[]]]
        places: list[int] = []
        for item in outline.outline:
            if item is None:
                steps.append([[]])
                continue
            event, at = item
            if isinstance(event, Launched):
                steps[-1] += (event, at), []
                continue
            if isinstance(event, Allocated):
                places.append(at)
            events = steps[-1][-1]
            assert isinstance(events, list)
            events.append(event)
        return cls(steps, np.array(places, dtype=np.int64))


def _settle(at: int, first: Atom, *others: Atom) -> SettledAtom:
    """Find the ways by which the same atom of several records names blocks and a storage."""
    assert all(other.key == first.key for other in others)
    blocks = tuple(
        _name(place, *(other.blocks[number] for other in others))
        for number, place in enumerate(first.blocks)
    )
    storage = first.storage and _name(first.storage, *map(_storage_of, others))
    return SettledAtom(first.key, blocks, storage, at)


def _name(place: Place, *others: Place) -> tuple[int, int]:
    way = place.shared_way(*others)
    if way is None:
        raise NotAlikeError("no rule says which block or which storage comes next")
    return way, place.by[way]


def _storage_of(atom: Atom) -> Place:
    assert atom.storage is not None
    return atom.storage


def _may_be_same(one: Atom, other: Atom) -> bool:
    """Return whether two atoms of records with different numbers of blocks may be the same."""
    if one.key != other.key:
        return False
    if one[1:3] == other[1:3]:
        return True
    pairs = zip(one.blocks, other.blocks, strict=True)
    return all(a.shared_way(b) is not None for a, b in pairs) and (
        one.storage is None or one.storage.shared_way(_storage_of(other)) is not None
    )


def _may_follow(one: Atom, other: Atom) -> bool:
    """Return whether an atom of a block may be that of the next block."""
    return (
        one.key == other.key
        and one.sizes == other.sizes
        and all(a.by[0] == b.by[0] for a, b in zip(one.blocks, other.blocks, strict=True))
        and (one.storage is None or one.storage.shared_way(_storage_of(other)) is not None)
    )


def _find_insertions(
    few: Sequence[Atom], more: Sequence[Atom], most: Sequence[Atom]
) -> list[tuple[int, int]]:
    """Find what a record of one more block has more, once, and one of two more blocks, twice.

    Returns:
        Where in the shortest record there are further atoms, and how many.

    Raises:
        NotAlikeError: The records do not nest.
    """
    found: list[tuple[int, int]] = []
    i = j = k = last = 0
    while True:
        alike = _count_same(few[i:], more[j:], most[k:])
        i, j, k = i + alike, j + alike, k + alike
        spare = (len(more) - j) - (len(few) - i)
        if i == len(few) and not spare and k == len(most):
            return found
        for length in range(1, spare + 1):
            goes_on = (
                length == spare
                if i == len(few)
                else k + 2 * length < len(most)
                and _may_be_same(few[i], more[j + length])
                and _may_be_same(few[i], most[k + 2 * length])
            )
            back = goes_on and _find_start((few, more, most), (i, j, k), length, i - last)
            if back is not False and back is not None:
                break
        else:
            raise NotAlikeError(f"event {i:,} of {len(few):,} is another with one more block")
        last = i - back
        found.append((last, length))
        j, k = j + length, k + 2 * length


def _count_same(few: Sequence[Atom], more: Sequence[Atom], most: Sequence[Atom]) -> int:
    """Return how many atoms may be the same from the start."""
    together = zip(few, more, most, strict=False)
    for count, (a, b, c) in enumerate(together):
        if not (_may_be_same(a, b) and _may_be_same(a, c)):
            return count
    return min(map(len, (few, more, most)))


def _find_start(
    records: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    at: tuple[int, int, int],
    length: int,
    furthest: int,
) -> int | None:
    """Return by how many atoms earlier the further ones begin; None if there are none so long.

    The atoms that follow a block may begin like the block itself, up to sizes.
    """
    few, more, most = records
    i, j, k = at
    if j + length > len(more) or k + 2 * length > len(most):
        return None

    def is_repeated(number: int) -> bool:
        """Return whether an atom of the second record is twice in the third."""
        atom, copy = more[j + number], k + number
        return _may_follow(atom, most[copy]) and _may_follow(atom, most[copy + length])

    unlike = sum(not is_repeated(number) for number in range(length))
    for back in range(furthest + 1):
        if not unlike:
            return back
        before = -back - 1
        if (
            back == furthest
            or not _may_be_same(few[i + before], more[j + before + length])
            or not _may_be_same(few[i + before], most[k + before + 2 * length])
        ):
            return None
        unlike += is_repeated(before + length) - is_repeated(before)
    return None


def interpolate(low: int, high: int, batch: int, at_low: Sizes, at_high: Sizes) -> Sizes:
    """Return the sizes of a batch between two others; what is not affine is rounded down."""

    def along(a: Integers, b: Integers) -> Integers:
        growth, rest = np.divmod(b - a, high - low)
        found: Integers = a + growth * (batch - low) + rest * (batch - low) // (high - low)
        return found

    return Sizes(along(at_low.least, at_high.least), along(at_low.growth, at_high.growth))
