"""The record of a model of many equal blocks, assembled from records of the same model with few.

A record is read as a sequence of atoms: a storage is allocated or freed, autograd keeps one or
releases it, an operator runs, reads and writes. An atom names a block by its distance from the
block of the atom before it, and a storage by its position among storages that are alike. So the
atoms of one block are those of the next.

Three records, of n, n + 1 and n + 2 blocks, must nest: each has the atoms of the one before it, and
at the same places the same further ones. By induction the record of any number of blocks has these
further atoms once more for each block. All sizes must be affine in the number of blocks. What does
not follow this is refused, and the whole model has to be traced.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpprof.flops.cost import AttentionShape
from dpprof.memory.events import Allocated, Entered, Event, Freed, Op, Saved, Storage, Unsaved
from dpprof.records.terms import Phase

Sizes = npt.NDArray[np.int64]

_RUN = 300
"""After what is new, so many atoms are compared to find where the known ones go on."""


class NotAlikeError(Exception):
    """The records do not nest; the message says what is the first that differs."""


class Recording(NamedTuple):
    """What was recorded of a training: its set-up, its first step, and a later one."""

    storages: Sequence[Storage]
    events: Sequence[Event]
    marks: tuple[int, int, int, int]
    """Where in the events the first step begins and ends, and where the later one does."""

    notes: dict[str, str]
    block_bytes: int
    """The allocator rounds sizes up to multiples of this."""


class BlockNames:
    """Finds the number of a block in the name of a module.

    Args:
        container: The name of the module whose children are the blocks.
    """

    def __init__(self, container: str) -> None:
        self._before = container + "."

    def split(self, name: str | None) -> tuple[str | None, int | None]:
        """Return a name with a gap in place of the block's number, and the number."""
        if name is None or not name.startswith(self._before):
            return name, None
        number, dot, rest = name.removeprefix(self._before).partition(".")
        if not number.isdecimal():
            return name, None
        return f"{self._before}{{}}{dot}{rest}", int(number)

    @staticmethod
    def join(name: str | None, block: int | None) -> str | None:
        """Put the number of a block into the gap of a name."""
        return name if name is None or block is None else name.replace("{}", str(block), 1)


class _Place(NamedTuple):
    """Ways to name a block, or one of several storages that are alike; one must stay the same."""

    by: tuple[int, ...]

    def shared(self, *others: "_Place") -> int | None:
        """Return the first way by which this and others are named alike; None for none."""
        for way, value in enumerate(self.by):
            if all(other.by[way] == value for other in others):
                return way
        return None


class _Atom(NamedTuple):
    key: int
    """Equal for atoms that differ in nothing but blocks, storages and sizes."""

    blocks: tuple[_Place, ...]
    """By distance from the last block, from the first one, and from the end."""

    storage: _Place | None
    """By position among storages that are alike, in the order in which they were allocated or
    last used, from the oldest or from the newest."""

    sizes: tuple[int, ...]


class _Vocabulary:
    """Numbers the keys of atoms, and keeps an example of each."""

    def __init__(self) -> None:
        self.keys: dict[tuple[Any, ...], int] = {}
        self.examples: list[Any] = []

    def number(self, key: tuple[Any, ...], example: Any) -> int:
        number = self.keys.setdefault(key, len(self.examples))
        if number == len(self.examples):
            self.examples.append(example)
        return number


class _Alike:
    """Storages that are alike and alive, by class and block."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int | None], list[int]] = {}
        self._used: dict[tuple[int, int | None], list[int]] = {}
        self._group: dict[int, tuple[int, int | None]] = {}
        self._saved: Counter[int] = Counter()
        self._freed: set[int] = set()

    def add(self, number: int, kind: int, block: int | None) -> None:
        group = self._group[number] = kind, block
        self._made.setdefault(group, []).append(number)
        self._used.setdefault(group, []).append(number)

    def kind(self, number: int) -> tuple[int, int | None]:
        return self._group[number]

    def position(self, number: int) -> _Place:
        group = self._group[number]
        made, used = self._made[group], self._used[group]
        at, last_used, last = made.index(number), used.index(number), len(made) - 1
        return _Place((at, last - at, last_used, last - last_used))

    def find(self, kind: int, block: int | None, way: int, position: int) -> int:
        members = (self._made if way < 2 else self._used).get((kind, block), [])  # noqa: PLR2004
        at = position if way % 2 == 0 else len(members) - 1 - position
        if not 0 <= at < len(members):
            raise NotAlikeError("a storage that is used is not there")
        return members[at]

    def follow(self, event: type, number: int) -> None:
        """Record that a storage is freed, kept, released or used."""
        if event is Saved:
            self._saved[number] += 1
        elif event is Unsaved:
            self._saved[number] -= 1
        elif event is Freed:
            self._freed.add(number)
        group = self._group[number]
        used = self._used[group]
        used.remove(number)
        if number in self._freed and not self._saved[number]:
            self._made[group].remove(number)
        else:
            used.append(number)


def in_order(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events with those freed together by number: Python frees some in any order."""
    together: list[Freed] = []
    for event in events:
        if isinstance(event, Freed):
            together.append(event)
            continue
        if together:
            yield from sorted(together)
            together.clear()
        yield event
    yield from sorted(together)


_FREED, _SAVED, _UNSAVED, _READ, _WRITTEN, _ENDED = range(6)
_TOUCHES: dict[int, type] = {_FREED: Freed, _SAVED: Saved, _UNSAVED: Unsaved}


class _Reader:
    """Reads a recording of ``count`` blocks as atoms."""

    def __init__(self, vocabulary: _Vocabulary, names: BlockNames, count: int) -> None:
        self._vocabulary = vocabulary
        self._names = names
        self._last = count - 1
        self._block = 0
        self._alike = _Alike()
        self.atoms: list[_Atom] = []

    def read(self, recording: Recording) -> Sequence[_Atom]:
        marks = iter((*recording.marks, -1))
        mark = next(marks)
        for at, event in enumerate(recording.events):
            while at == mark:
                self._add(("mark",), None)
                mark = next(marks)
            match event:
                case Allocated(number):
                    self._allocate(number, recording.storages[number])
                case Entered(phase):
                    self._add(("phase", phase), phase)
                case Op():
                    self._run(event)
                case Freed(number):
                    self._refer(_FREED, number)
                case Saved(number):
                    self._refer(_SAVED, number)
                case Unsaved(number):
                    self._refer(_UNSAVED, number)
        self._add(("mark",), None)
        return self.atoms

    def _go_to(self, block: int) -> _Place:
        place = _Place((block - self._block, block, block - self._last))
        self._block = block
        return place

    def _add(
        self,
        key: tuple[Any, ...],
        example: Any,
        blocks: Iterable[int | None] = (),
        storage: _Place | None = None,
        sizes: tuple[int, ...] = (),
    ) -> int:
        number = self._vocabulary.number(key, example)
        places = tuple(self._go_to(one) for one in blocks if one is not None)
        self.atoms.append(_Atom(number, places, storage, sizes))
        return number

    def _allocate(self, number: int, storage: Storage) -> None:
        module, in_module = self._names.split(storage.module)
        layer, in_layer = self._names.split(storage.layer)
        key = (
            *("allocated", storage.op, storage.phase, module, layer, storage.code, storage.node),
            *(storage.function, storage.sampler, storage.recomputed, frozenset(storage.roles)),
            *(len(storage.shape), in_module is None, in_layer is None),
        )
        sizes = (storage.requested, *storage.shape)
        kind = self._add(key, (storage, module, layer), (in_module, in_layer), sizes=sizes)
        self._alike.add(number, kind, in_module if in_layer is None else in_layer)

    def _refer(self, what: int, number: int, *sizes: int) -> None:
        if number < 0:
            self._add((what, None), (what, None), sizes=sizes)
            return
        kind, block = self._alike.kind(number)
        self._add((what, kind), (what, kind), (block,), self._alike.position(number), sizes)
        self._alike.follow(_TOUCHES.get(what, Op), number)

    def _run(self, op: Op) -> None:
        module, block = self._names.split(op.module)
        cost = op.cost
        key = (
            *("ran", op.phase, module, op.op_kind, op.call, op.name, block is None, cost.op),
            *(cost.family, cost.dtype, cost.product is None, cost.is_aligned),
            *(cost.formula_unknown, cost.attention and cost.attention[4:]),
        )
        sizes = (cost.flops, *(cost.product or ()), *(cost.attention or ())[:4])
        self._add(key, (op, module), (block,), sizes=sizes)
        for number, size in op.reads:
            self._refer(_READ, number, size)
        for number, size in op.writes:
            self._refer(_WRITTEN, number, size)
        self._add((_ENDED,), (_ENDED, None))


def _are_alike(one: _Atom, other: _Atom) -> bool:
    if one.key != other.key:
        return False
    if one[1:3] == other[1:3]:
        return True
    pairs = zip(one.blocks, other.blocks, strict=True)
    return all(a.shared(b) is not None for a, b in pairs) and (
        one.storage is None or one.storage.shared(other.storage) is not None  # type: ignore[arg-type]
    )


def _count_alike(few: Sequence[_Atom], i: int, more: Sequence[_Atom], j: int, most: int) -> int:
    most = min(most, len(few) - i, len(more) - j)
    return next((n for n in range(most) if not _are_alike(few[i + n], more[j + n])), most)


def _find_insertions(few: Sequence[_Atom], more: Sequence[_Atom]) -> list[tuple[int, int]]:
    """Return where the longer sequence has more atoms than the shorter one, and how many."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while True:
        alike = _count_alike(few, i, more, j, len(few))
        i, j = i + alike, j + alike
        spare = (len(more) - j) - (len(few) - i)
        if i == len(few) and not spare:
            return found
        best, best_run = 0, 0
        for length in range(1, spare + 1):
            run = _count_alike(few, i, more, j + length, _RUN)
            if run > best_run or (i == len(few) and length == spare):
                best, best_run = length, run
            if run and _repeats(more, j, length):
                best = length
                break
        if not best:
            raise NotAlikeError(f"atom {i} of {len(few)}")
        back = _find_rotation(few, i, more, j, best, i - (found[-1][0] if found else 0))
        found.append((i - back, best))
        j += best


def _repeats(atoms: Sequence[_Atom], at: int, length: int) -> bool:
    """Return whether so many atoms are those before them once more."""
    return at >= length and all(
        one.key == before.key
        and one.sizes == before.sizes
        and all(a.by[0] == b.by[0] for a, b in zip(one.blocks, before.blocks, strict=True))
        for one, before in zip(atoms[at : at + length], atoms[at - length : at], strict=True)
    )


def _find_rotation(
    few: Sequence[_Atom], i: int, more: Sequence[_Atom], j: int, length: int, most: int
) -> int:
    """Return by how many atoms further ones may begin earlier so that most sizes are equal.

    Atoms that differ in sizes alone follow one another where a list has one for each parameter.
    """
    best = gain = best_gain = 0
    for back in range(1, most + 1):
        known, before, after = few[i - back], more[j - back], more[j - back + length]
        if not _are_alike(known, after):
            break
        gain += (known.sizes == after.sizes) - (known.sizes == before.sizes)
        if gain > best_gain:
            best, best_gain = back, gain
    return best


class _Learned(NamedTuple):
    """An atom, with the ways by which it names blocks and a storage."""

    key: int
    blocks: tuple[tuple[int, int], ...]
    storage: tuple[int, int] | None
    at: int
    """Where its sizes begin."""

    count: int


def _learn_atom(alike: Sequence[_Atom], at: int) -> _Learned:
    first, *others = alike
    if any(other.key != first.key for other in others):
        raise NotAlikeError("an atom differs")

    def settle(place: _Place, same: Iterable[_Place]) -> tuple[int, int]:
        way = place.shared(*same)
        if way is None:
            raise NotAlikeError("a block or a storage has no rule")
        return way, place.by[way]

    blocks = tuple(
        settle(place, (other.blocks[which] for other in others))
        for which, place in enumerate(first.blocks)
    )
    storage = first.storage and settle(first.storage, (one.storage for one in others if one.storage))
    return _Learned(first.key, blocks, storage, at, len(first.sizes))


class Pattern:
    """How records of a model grow with its blocks; ``learn`` finds it."""

    def __init__(
        self,
        count: int,
        vocabulary: _Vocabulary,
        names: BlockNames,
        parts: Sequence[tuple[Sequence[_Learned], Sequence[_Learned]]],
        like: Recording,
    ) -> None:
        self.count = count
        """The blocks of the smallest record."""

        self.vocabulary = vocabulary
        self.names = names
        self.block_bytes = like.block_bytes
        self._parts = parts
        self._notes = like.notes

    @classmethod
    def learn(cls, recordings: Sequence[Recording], count: int, names: BlockNames) -> "Learned":
        """Learn from the records of ``count``, ``count + 1`` and ``count + 2`` blocks.

        Raises:
            NotAlikeError: They do not nest, or a size is not affine.
        """
        vocabulary = _Vocabulary()
        few, more, most = (
            _Reader(vocabulary, names, count + extra).read(one)
            for extra, one in enumerate(recordings)
        )
        parts = []
        base: list[int] = []
        slope: list[int] = []
        i = j = k = 0
        for at, length in [*_find_insertions(few, more), (len(few), 0)]:
            plain, repeated = [], []
            for a, b, c in zip(
                few[i:at], more[j : j + at - i], most[k : k + at - i], strict=True
            ):
                plain.append(_learn_atom((a, b, c), len(base)))
                base += a.sizes
                growth = [y - x for x, y in zip(a.sizes, b.sizes, strict=True)]
                if growth != [y - x for x, y in zip(b.sizes, c.sizes, strict=True)]:
                    raise NotAlikeError("a size is not affine in the number of blocks")
                slope += growth
            i, j, k = at, j + at - i, k + at - i
            for v, c, d in zip(
                more[j : j + length],
                most[k : k + length],
                most[k + length : k + 2 * length],
                strict=True,
            ):
                if not v.sizes == c.sizes == d.sizes:
                    raise NotAlikeError("a block has other sizes than the next")
                repeated.append(_learn_atom((v, c, d), len(base)))
                base += v.sizes
                slope += [0] * len(v.sizes)
            j, k = j + length, k + 2 * length
            parts.append((plain, repeated))
        if (j, k) != (len(more), len(most)):
            raise NotAlikeError("a record has more at its end")
        return Learned(
            cls(count, vocabulary, names, parts, recordings[0]),
            np.array(base, dtype=np.int64),
            np.array(slope, dtype=np.int64),
        )

    def assemble(self, blocks: int, base: Sizes, slope: Sizes) -> Recording:
        """Assemble the record of so many blocks."""
        sizes = (base + slope * (blocks - self.count)).tolist()
        writer = _Writer(self, blocks, sizes)
        for plain, repeated in self._parts:
            writer.write(plain)
            for _ in range(blocks - self.count):
                writer.write(repeated)
        first, first_end, steady, end = writer.marks
        return Recording(
            writer.storages,
            writer.events,
            (first, first_end, steady, end),
            self._notes,
            self.block_bytes,
        )


class Learned(NamedTuple):
    """A pattern, and the sizes that it was learned with."""

    pattern: Pattern
    base: Sizes
    slope: Sizes

    def assemble(self, blocks: int) -> Recording:
        """Assemble the record of so many blocks."""
        return self.pattern.assemble(blocks, self.base, self.slope)


class _Writer:
    """Writes atoms as the storages and events of a recording."""

    def __init__(
        self, pattern: "Pattern", count: int, sizes: Sequence[int]
    ) -> None:
        self._examples = pattern.vocabulary.examples
        self._names = pattern.names
        self._block_bytes = pattern.block_bytes
        self._last = count - 1
        self._sizes = sizes
        self._block = 0
        self._alike = _Alike()
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.marks: list[int] = []
        self._op: tuple[Op, str | None, Sequence[int]] | None = None
        self._reads: list[tuple[int, int]] = []
        self._writes: list[tuple[int, int]] = []

    def _go_to(self, place: tuple[int, int]) -> int:
        way, value = place
        self._block = value + (self._block, 0, self._last)[way]
        return self._block

    def write(self, atoms: Iterable[_Learned]) -> None:
        """Append atoms."""
        for atom in atoms:
            example = self._examples[atom.key]
            sizes = self._sizes[atom.at : atom.at + atom.count]
            blocks = [self._go_to(place) for place in atom.blocks]
            if example is None:
                self.marks.append(len(self.events))
            elif isinstance(example, str):
                phase: Any = example
                self.events.append(Entered(phase))
            elif isinstance(example[0], Storage):
                self._allocate(atom.key, example, blocks, sizes)
            elif isinstance(example[0], Op):
                op, module = example
                self._op = op, self._names.join(module, blocks[0] if blocks else None), sizes
            else:
                self._refer(atom, example, blocks[0] if blocks else None, sizes)

    def _allocate(
        self, kind: int, example: tuple[Storage, Any, Any], blocks: list[int], sizes: Sequence[int]
    ) -> None:
        like, module, layer = example
        waiting = iter(blocks)
        in_module = next(waiting) if module and "{}" in module else None
        in_layer = next(waiting) if layer and "{}" in layer else None
        requested, *shape = sizes
        storage = Storage(
            -(-requested // self._block_bytes) * self._block_bytes,
            like.op,
            like.phase,
            self._names.join(module, in_module),
            requested,
            tuple(shape),
            like.code,
            like.function,
            like.node,
            like.sampler,
            None,
            like.recomputed,
            like.roles,
            self._names.join(layer, in_layer),
        )
        number = len(self.storages)
        self._alike.add(number, kind, in_module if in_layer is None else in_layer)
        self.storages.append(storage)
        self.events.append(Allocated(number))

    def _refer(
        self, atom: _Learned, example: tuple[int, int | None], block: int | None,
        sizes: Sequence[int],
    ) -> None:
        what, kind = example
        if what == _ENDED:
            self._end_op()
            return
        number = -1
        if kind is not None:
            assert atom.storage is not None
            number = self._alike.find(kind, block, *atom.storage)
            self._alike.follow(_TOUCHES.get(what, Op), number)
        match what:
            case 0:
                self.events.append(Freed(number))
            case 1:
                self.events.append(Saved(number))
            case 2:
                self.events.append(Unsaved(number))
            case 3:
                self._reads.append((number, sizes[0]))
            case 4:
                self._writes.append((number, sizes[0]))

    def _end_op(self) -> None:
        assert self._op is not None
        like, module, (flops, *rest) = self._op
        cost = like.cost._replace(flops=flops)
        if cost.product is not None:
            cost = cost._replace(product=tuple(rest[:4]))
            rest = rest[4:]
        if cost.attention is not None:
            cost = cost._replace(attention=AttentionShape(*rest, *cost.attention[4:]))
        self.events.append(
            like._replace(
                module=module, cost=cost, reads=self._reads, writes=self._writes, at_s=0.0
            )
        )
        self._reads, self._writes = [], []
