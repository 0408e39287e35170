"""How the record of a training grows with the blocks of its model, and with the batch.

A model is traced with n, n + 1 and n + 2 blocks. Where the second record has atoms that the first
lacks, these are the atoms of the block that was added. The third record must have them twice at the
same places, once for each added block. Then a record with any number of further blocks is taken to
have them once for each. Sizes must be affine in the number of blocks. A model whose records differ
in another way is refused, and has to be traced as a whole.

Between two batches whose records have the same atoms, sizes are affine in the batch too, if a third
batch confirms it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dpprof.predict.memory.allocator_replay import Footprint
from dpprof.predict.memory.atoms import Atom, AtomReader, Place, Recording, Vocabulary
from dpprof.predict.memory.layout import Integers, Layout, SettledAtom
from dpprof.subjects.models.blocks import Blocks, NotAlikeError


class Sizes(NamedTuple):
    """All sizes of a pattern for one batch."""

    least: Integers  # the sizes with the smallest number of blocks that was traced
    growth: Integers  # what each further block adds to them


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
        self._layouts: dict[int, Layout] = {}
        few, more, most = (self._read(record, number) for number, record in enumerate(recordings))
        self._few, self._more = few, more
        # The last part has the atoms after the last added block, and adds none.
        self._insertions = [*_find_insertions(few, more, most), (len(few), 0)]
        self._parts: list[tuple[list[SettledAtom], list[SettledAtom]]] = []
        start = k = 0  # the first size of the next atom, and its place in the third record
        for shared, added in self._split(few, more):
            parts: tuple[list[SettledAtom], list[SettledAtom]] = [], []
            for a, b in shared:
                parts[0].append(_settle(start, a, b, most[k]))
                # What the second block adds to a size, the third must add again.
                if [2 * y - x for x, y in zip(a.sizes, b.sizes, strict=True)] != [*most[k].sizes]:
                    raise NotAlikeError("a size is not affine in the number of blocks")
                start += len(a.sizes)
                k += 1
            for number, b in enumerate(added):
                # The third record has an added atom of its first added block, and of its second.
                first, second = most[k + number], most[k + len(added) + number]
                parts[1].append(_settle(start, b, first, second))
                start += len(b.sizes)
            k += 2 * len(added)
            self._parts.append(parts)
        self.sizes = self._measure(few, more)

    def _read(self, recording: Recording, further: int) -> Sequence[Atom]:
        blocks = replace(self._blocks, count=self._blocks.count + further)
        return AtomReader(self._vocabulary, blocks).read(recording)

    def _split(
        self, few: Sequence[Atom], more: Sequence[Atom]
    ) -> Iterator[tuple[Sequence[tuple[Atom, Atom]], Sequence[Atom]]]:
        """Yield pairs of atoms that both records have, and the added ones that follow them."""
        i = j = 0
        for place, length in self._insertions:
            until = j + place - i
            yield list(zip(few[i:place], more[j:until], strict=True)), more[until : until + length]
            i, j = place, until + length

    def _measure(self, few: Sequence[Atom], more: Sequence[Atom]) -> Sizes:
        least: list[int] = []
        growth: list[int] = []
        for shared, added in self._split(few, more):
            for a, b in shared:
                least += a.sizes
                growth += [y - x for x, y in zip(a.sizes, b.sizes, strict=True)]
            for b in added:  # every block adds the same
                least += b.sizes
                growth += [0] * len(b.sizes)
        return Sizes(np.array(least, dtype=np.int64), np.array(growth, dtype=np.int64))

    def measure(self, few: Recording, more: Recording) -> Sizes:
        """Return the sizes of the same training with another batch.

        ``few`` is its record with the smallest number of blocks, ``more`` that with one more.

        Raises:
            NotAlikeError: It has other atoms.
        """
        return self._measure(
            self._read_like(few, 0, self._few), self._read_like(more, 1, self._more)
        )

    def _read_like(
        self, recording: Recording, further: int, expected: Sequence[Atom]
    ) -> Sequence[Atom]:
        """Read the record of another batch, whose atoms may differ in sizes alone."""
        atoms = self._read(recording, further)
        if [atom[:3] for atom in atoms] != [atom[:3] for atom in expected]:
            raise NotAlikeError("another batch has other atoms")
        return atoms

    def guess(self, more: Recording, times: float) -> Sizes:
        """Guess the sizes with another batch from one record; a trace must confirm them.

        Args:
            more: Its record with one more than the smallest number of blocks.
            times: How many times as large the batch is. What each further block adds to a size is
                taken to grow with the batch, or not to grow where the size itself did not change.

        Raises:
            NotAlikeError: It has other atoms.
        """
        atoms = self._read_like(more, 1, self._more)
        # Only the sum of the two is right: the smaller record is that of the first batch.
        mixed = self._measure(self._few, atoms)
        size = mixed.least + mixed.growth
        has_changed = size != self.sizes.least + self.sizes.growth
        growth = np.where(has_changed, np.rint(self.sizes.growth * times), self.sizes.growth)
        growth = growth.astype(np.int64)
        return Sizes(size - growth, growth)

    def assemble(self, count: int, sizes: Sizes) -> Recording:
        """Assemble the record of a model with so many blocks."""
        return self._lay_out(count).record(self._values(count, sizes).tolist(), self._like)

    def footprint(self, count: int, sizes: Sizes) -> Footprint:
        """Return what the training of a model with so many blocks allocates."""
        return self._lay_out(count).footprint(self._values(count, sizes).tolist(), self._like)

    def footprint_sizes(self, count: int, sizes: Sizes) -> Integers:
        """Return the sizes on which a footprint rests."""
        return self._values(count, sizes)[self._lay_out(count).places]

    def _values(self, count: int, sizes: Sizes) -> Integers:
        return sizes.least + (count - self._blocks.count) * sizes.growth

    def _lay_out(self, count: int) -> Layout:
        if count not in self._layouts:
            layout = Layout(self._vocabulary.examples, replace(self._blocks, count=count))
            for shared, added in self._parts:
                layout.write(shared)
                for _ in range(count - self._blocks.count):
                    layout.write(added)
            self._layouts[count] = layout
        return self._layouts[count]


def _settle(start: int, first: Atom, *others: Atom) -> SettledAtom:
    """Find how an atom names blocks and a storage in every record, so that it does in others."""
    assert all(other.key == first.key for other in others)
    blocks = tuple(
        _name(place, *(other.blocks[number] for other in others))
        for number, place in enumerate(first.blocks)
    )
    storage = first.storage and _name(first.storage, *map(_storage_of, others))
    return SettledAtom(first.key, blocks, storage, start)


def _name(place: Place, *others: Place) -> tuple[int, int]:
    way = place.shared_way(*others)
    if way is None:
        raise NotAlikeError("no rule says which block or which storage comes next")
    return way, place.by[way]


def _storage_of(atom: Atom) -> Place:
    assert atom.storage is not None
    return atom.storage


def _may_be_same(a: Atom, b: Atom) -> bool:
    """Return whether two atoms of records with different numbers of blocks may be the same."""
    if a.key != b.key:
        return False
    if a[1:3] == b[1:3]:  # the usual case, at less cost
        return True
    pairs = zip(a.blocks, b.blocks, strict=True)
    return all(x.shared_way(y) is not None for x, y in pairs) and _may_share_storage(a, b)


def _may_follow(a: Atom, b: Atom) -> bool:
    """Return whether an atom of a block may be that of the next block.

    Both must name blocks by the same distances from the block of the atom before.
    """
    pairs = zip(a.blocks, b.blocks, strict=True)
    is_alike = a.key == b.key and a.sizes == b.sizes
    return is_alike and all(x.by[0] == y.by[0] for x, y in pairs) and _may_share_storage(a, b)


def _may_share_storage(a: Atom, b: Atom) -> bool:
    return a.storage is None or a.storage.shared_way(_storage_of(b)) is not None


def _find_insertions(
    few: Sequence[Atom], more: Sequence[Atom], most: Sequence[Atom]
) -> list[tuple[int, int]]:
    """Find the atoms of added blocks: once in the second record, and twice in the third.

    Returns:
        For each place in the shortest record where such atoms are, the place and how many.

    Raises:
        NotAlikeError: The records differ in another way.
    """
    insertions: list[tuple[int, int]] = []
    i = j = k = last = 0  # places in the three records, and the last insertion in the first
    while True:
        alike = _count_same(few[i:], more[j:], most[k:])
        i, j, k = i + alike, j + alike, k + alike
        spare = (len(more) - j) - (len(few) - i)  # added atoms that are still to be placed
        if i == len(few) and not spare and k == len(most):
            return insertions
        # The shortest part comes first: a longer one could swallow atoms that the records share.
        for length in range(1, spare + 1):
            goes_on = (
                length == spare
                if i == len(few)
                else k + 2 * length < len(most)
                and _may_be_same(few[i], more[j + length])
                and _may_be_same(few[i], most[k + 2 * length])
            )
            back = _find_start((few, more, most), (i, j, k), length, i - last) if goes_on else None
            if back is not None:
                break
        else:
            raise NotAlikeError(f"event {i:,} of {len(few):,} is another with one more block")
        last = i - back
        insertions.append((last, length))
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
    places: tuple[int, int, int],
    length: int,
    furthest: int,
) -> int | None:
    """Return by how many atoms before the places the added ones begin; None if they nowhere do.

    The atoms that follow a block may begin like those of the block, up to sizes. Then the records
    seem alike for longer than they are, and the added atoms have begun before.
    """
    few, more, most = records
    i, j, k = places
    if j + length > len(more) or k + 2 * length > len(most):
        return None

    def is_repeated(number: int) -> bool:
        """Return whether the third record has an atom of the second one twice."""
        atom, copy = more[j + number], k + number
        return _may_follow(atom, most[copy]) and _may_follow(atom, most[copy + length])

    # A window of that length moves back by one atom at a time until all in it are repeated.
    unlike = sum(not is_repeated(number) for number in range(length))
    for back in range(furthest + 1):
        if not unlike:
            return back
        before = -back - 1
        # What leaves the window at its end must be an atom that all three records share.
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
        between: Integers = a + growth * (batch - low) + rest * (batch - low) // (high - low)
        return between

    return Sizes(along(at_low.least, at_high.least), along(at_low.growth, at_high.growth))
