"""The record of a training as a sequence of atoms, and back.

An atom says that a storage is allocated or freed, that autograd keeps one or releases it, or that
an operator runs, reads or writes. It names a block by its distance from the block of the atom
before it, and a storage by its position among storages that are alike. So one block has the atoms
of the next.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dpprof.predict.memory.events import (
    Allocated,
    Entered,
    Event,
    Freed,
    Launched,
    Op,
    Saved,
    Storage,
    TensorKind,
    Unsaved,
    Workspace,
)
from dpprof.subjects.models.blocks import Blocks, NotAlikeError, join


class Recording(NamedTuple):
    """What was recorded of a training: its set-up, its first step, and a later one."""

    storages: Sequence[Storage]
    events: Sequence[Event]
    marks: tuple[int, int, int, int]
    """Where in the events the first step begins and ends, and where the later one does."""

    notes: dict[str, str]
    block_bytes: int
    """The allocator rounds sizes up to multiples of this."""

    launches: Sequence[tuple[int, Launched]] = ()
    """Where in the events kernels were launched that may allocate memory of their own."""

    workspaces: Mapping[Any, Workspace] = MappingProxyType({})
    """What they allocate, by overload packet."""

    is_graph: bool = False
    """Whether the later step is captured as a CUDA graph."""


class Place(NamedTuple):
    """The same place, named in several ways; one of them must stay the same."""

    by: tuple[int, ...]

    def shared_way(self, *others: "Place") -> int | None:
        """Return the first way in which this and others have the same name; None for none."""
        for way, value in enumerate(self.by):
            if all(other.by[way] == value for other in others):
                return way
        return None


class Atom(NamedTuple):
    """One thing that happens."""

    key: int
    """Equal for atoms that differ in nothing but blocks, storages and sizes."""

    blocks: tuple[Place, ...]
    """By distance from the last block that was named, from the first block, and from the end."""

    storage: Place | None
    """By position among storages that are alike, in the order in which they were allocated, or
    were last used; from the oldest, or from the newest."""

    sizes: tuple[int, ...]


class Vocabulary:
    """Numbers the keys of atoms, and keeps an example of each."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.examples: list[Any] = []

    def number(self, key: tuple[Any, ...], example: Any) -> int:
        """Return the number of a key; a new one gets the example."""
        number = self._numbers.setdefault(key, len(self.examples))
        if number == len(self.examples):
            self.examples.append(example)
        return number


class _Alike:
    """The storages that are alive, or are kept by autograd, by what they are and by block."""

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

    def group(self, number: int) -> tuple[int, int | None]:
        return self._group[number]

    def locate(self, number: int) -> Place:
        group = self._group[number]
        made, used = self._made[group], self._used[group]
        index, index_by_use, last = made.index(number), used.index(number), len(made) - 1
        return Place((index, last - index, index_by_use, last - index_by_use))

    def find(self, kind: int, block: int | None, way: int, position: int) -> int:
        by_use, from_newest = divmod(way, 2)
        members = (self._used if by_use else self._made).get((kind, block), [])
        index = len(members) - 1 - position if from_newest else position
        if not 0 <= index < len(members):
            raise NotAlikeError("a storage that is used does not exist")
        return members[index]

    def follow(self, number: int, event: type) -> None:
        """Follow that a storage is freed, kept, released, or else used."""
        if event is Saved:
            self._saved[number] += 1
        elif event is Unsaved:
            self._saved[number] -= 1
        elif event is Freed:
            self._freed.add(number)
        group = self._group[number]
        self._used[group].remove(number)
        if number in self._freed and not self._saved[number]:
            self._made[group].remove(number)
        else:
            self._used[group].append(number)


def sort_frees(events: Iterable[Event], borders: Container[int]) -> list[Event]:
    """Return events, with frees that follow one another by number: Python frees in any order.

    No event crosses one of the borders, which are places among the events.
    """
    ordered: list[Event] = []
    together: list[Freed] = []
    for index, event in enumerate(events):
        if index in borders or not isinstance(event, Freed):
            ordered += sorted(together)
            together.clear()
        if isinstance(event, Freed):
            together.append(event)
        else:
            ordered.append(event)
    return ordered + sorted(together)


def around_launches(launches: Iterable[tuple[int, Launched]]) -> Iterator[int]:
    """Yield where what kernels allocate and free begins and ends among the events."""
    for index, launched in launches:
        yield index
        yield index + 2 * launched.storages


_TOUCHING = (Freed, Saved, Unsaved)
_READ, _WRITTEN, _ENDED = "read", "written", "ended"


def read_atoms(recording: Recording, vocabulary: Vocabulary, blocks: Blocks) -> Sequence[Atom]:
    """Read a recording of a model with these blocks as atoms."""
    return _Reader(vocabulary, blocks).read(recording)


class _Reader:
    def __init__(self, vocabulary: Vocabulary, blocks: Blocks) -> None:
        self._vocabulary = vocabulary
        self._blocks = blocks
        self._block = 0
        self._alike = _Alike()
        self._atoms: list[Atom] = []

    def read(self, recording: Recording) -> Sequence[Atom]:
        launches = deque(recording.launches)
        skipped = 0
        for index, event in enumerate(recording.events):
            self._mark(index, recording.marks)
            while launches and launches[0][0] == index:
                _, launched = launches.popleft()
                self._launch(launched)
                skipped = 2 * launched.storages
            if skipped:
                skipped -= 1
                continue
            match event:
                case Allocated(number):
                    self._allocate(number, recording.storages[number])
                case Entered(phase):
                    self._add(("entered", phase), event)
                case Op():
                    self._run(event)
                case _:
                    self._touch(type(event), event.number)
        self._mark(len(recording.events), recording.marks)
        return self._atoms

    def _mark(self, index: int, marks: Sequence[int]) -> None:
        for _ in range(marks.count(index)):
            self._add(("mark",), None)

    def _add(
        self,
        key: tuple[Any, ...],
        example: Any,
        blocks: Iterable[int | None] = (),
        storage: Place | None = None,
        sizes: tuple[int, ...] = (),
    ) -> int:
        number = self._vocabulary.number(key, example)
        places = tuple(self._go_to(block) for block in blocks if block is not None)
        self._atoms.append(Atom(number, places, storage, sizes))
        return number

    def _go_to(self, block: int) -> Place:
        place = Place((block - self._block, block, block - self._blocks.count))
        self._block = block
        return place

    def _allocate(self, number: int, storage: Storage) -> None:
        module, in_module = self._blocks.split(storage.module)
        layer, in_layer = self._blocks.split(storage.layer)
        # An optimizer makes several lists of tensors that are alike, in one function.
        instruction = storage.instruction if storage.phase == "step" else 0
        key = (
            *("allocated", storage.op, storage.phase, module, layer, storage.code, storage.node),
            *(storage.function, instruction, storage.sampler, storage.recomputed),
            frozenset(storage.roles),
            *(len(storage.shape), in_module is None, in_layer is None),
        )
        sizes = (storage.requested, *storage.shape)
        kind = self._add(key, (storage, module, layer), (in_module, in_layer), sizes=sizes)
        self._alike.add(number, kind, in_module if in_layer is None else in_layer)

    def _launch(self, launched: Launched) -> None:
        module, block = self._blocks.split(launched.module)
        key = ("launched", *launched[:3], launched.phase, module, block is None)
        self._add(key, (launched, module), (block,), sizes=launched.sizes)

    def _touch(self, what: Any, number: int, *sizes: int) -> None:
        if number < 0:
            self._add((what, None), (what, None), sizes=sizes)
            return
        kind, block = self._alike.group(number)
        self._add((what, kind), (what, kind), (block,), self._alike.locate(number), sizes)
        self._alike.follow(number, what)

    def _run(self, op: Op) -> None:
        module, block = self._blocks.split(op.module)
        cost, attention = op.cost, op.cost.attention
        call, repeats = _fold(op.call)
        call, numbers = _take_numbers(call)
        key = (
            *("ran", op.phase, module, op.op_kind, call, op.name, block is None, cost.op),
            *(cost.family, cost.dtype, cost.product is None),
            *(cost.formula_unknown, attention and attention[_SIZES_OF_ATTENTION:], len(repeats)),
        )
        sizes = (
            cost.flops,
            int(cost.is_aligned),
            *repeats,
            *(cost.product or ()),
            *(attention or ())[:_SIZES_OF_ATTENTION],
            *numbers,
        )
        self._add(key, (op, module, call, len(repeats)), (block,), sizes=sizes)
        for number, size in op.reads:
            self._touch(_READ, number, size)
        for number, size in op.writes:
            self._touch(_WRITTEN, number, size)
        self._add((_ENDED,), (_ENDED, None))


_SIZES_OF_ATTENTION = 4
_GAP = "#"
_NUMBER = re.compile(r"(?<=[\[ ])-?\d+(?=[,\]}])")
"""A whole number in JSON."""


def _take_numbers(call: str) -> tuple[str, list[int]]:
    """Return the description of a call with gaps in place of its whole numbers, and these."""
    return _NUMBER.sub(_GAP, call), [*map(int, _NUMBER.findall(call))]


def _put_numbers(call: str, numbers: Iterator[int]) -> str:
    first, *others = call.split(_GAP)
    return first + "".join(f"{next(numbers)}{text}" for text in others)


def _fold(call: str) -> tuple[str, tuple[int, ...]]:
    """Shorten each list of equal tensors in the description of a call to one, and count them."""
    # A list of tensors is the first argument, or follows another one.
    if '[[{"t"' not in call and ', [{"t"' not in call.partition("[{")[2]:
        return call, ()
    name, arguments, named = json.loads(call)
    counts = []
    for index, value in enumerate(arguments):
        is_list = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_list and all(item == value[0] for item in value):
            arguments[index] = {"each": value[0]}
            counts.append(len(value))
    return json.dumps([name, arguments, named]), tuple(counts)


def _unfold(call: str, counts: Sequence[int]) -> str:
    name, arguments, named = json.loads(call)
    waiting = iter(counts)
    for index, value in enumerate(arguments):
        if isinstance(value, dict) and "each" in value:
            arguments[index] = [value["each"]] * next(waiting)
    return json.dumps([name, arguments, named])


def find_workspaces(
    launched: Launched, sizes: Sequence[int], workspaces: Mapping[Any, Workspace]
) -> list[int]:
    """Return what a kernel allocates if its tensors have these shapes and strides."""
    waiting = iter(sizes)

    def make(value: Any) -> Any:
        if isinstance(value, TensorKind):
            shape, strides = ([next(waiting) for _ in range(value.dimensions)] for _ in range(2))
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        if value is int:
            return next(waiting)
        return [make(item) for item in value] if isinstance(value, tuple) else value

    args, kwargs = launched.arguments
    positional = [make(value) for value in args]  # before the others, as their sizes come first
    named = {name: make(value) for name, value in kwargs}
    return [*filter(None, workspaces[launched.packet](*positional, **named))]


Outlined = tuple[Any, int] | None
"""That a storage is allocated or freed, or that a kernel is launched, and where its sizes are; None
where a step begins or ends."""


class SettledAtom(NamedTuple):
    """An atom whose blocks and storage are named in one way."""

    key: int
    blocks: Sequence[tuple[int, int]]
    """For each, the way and the name."""

    storage: tuple[int, int] | None
    at: int
    """Where its sizes begin among all."""


_Write = Callable[[Any, SettledAtom, Any, Sequence[int]], None]
"""A method that writes an atom that is like an example, with the blocks that it names."""


class Outline:
    """What atoms allocate and free as events of a model with these blocks, whatever the sizes."""

    def __init__(self, examples: Sequence[Any], blocks: Blocks) -> None:
        self.outline: list[Outlined] = []
        self.storage_count = 0
        self._writers = [(self._writer_of(example), example) for example in examples]
        self._starts = [0, 0, blocks.count]
        self._alike = _Alike()

    def write(self, atoms: Iterable[SettledAtom]) -> None:
        """Append atoms.

        Raises:
            NotAlikeError: One uses a storage that does not exist.
        """
        for atom in atoms:
            write, example = self._writers[atom.key]
            write(self, atom, example, [self._go_to(place) for place in atom.blocks])

    @classmethod
    def _writer_of(cls, example: Any) -> _Write:
        """Return what writes atoms that are like an example."""
        if example is None:
            return cls._mark
        if isinstance(example, Entered):
            return cls._enter
        kinds: dict[type, _Write] = {
            Storage: cls._allocate,
            Launched: cls._launch,
            Op: cls._begin_op,
        }
        return kinds.get(type(example[0]), cls._end_op if example[0] == _ENDED else cls._touch)

    def _go_to(self, place: tuple[int, int]) -> int:
        way, name = place
        self._starts[0] = self._starts[way] + name
        return self._starts[0]

    def _add_storage(
        self, atom: SettledAtom, example: tuple[Storage, Any, Any], blocks: Sequence[int]
    ) -> tuple[int | None, int | None]:
        """Number a storage; return the blocks of its module and of its layer."""
        _, module, layer = example
        waiting = iter(blocks)
        in_module = next(waiting) if module and "{}" in module else None
        in_layer = next(waiting) if layer and "{}" in layer else None
        number = self.storage_count
        self._alike.add(number, atom.key, in_module if in_layer is None else in_layer)
        self.storage_count += 1
        return in_module, in_layer

    def _find(
        self, atom: SettledAtom, example: tuple[Any, int | None], blocks: Sequence[int]
    ) -> int:
        """Return the number of the storage that something happens to; -1 if it is not known."""
        what, kind = example
        if kind is None:
            return -1
        assert atom.storage is not None
        number = self._alike.find(kind, blocks[0] if blocks else None, *atom.storage)
        self._alike.follow(number, what)
        return number

    def _mark(self, *_: Any) -> None:
        self.outline.append(None)

    def _enter(self, _: SettledAtom, example: Entered, __: Sequence[int]) -> None: ...

    def _allocate(
        self, atom: SettledAtom, example: tuple[Storage, Any, Any], blocks: Sequence[int]
    ) -> None:
        self.outline.append((Allocated(self.storage_count), atom.at))
        self._add_storage(atom, example, blocks)

    def _launch(self, atom: SettledAtom, example: tuple[Launched, Any], _: Sequence[int]) -> None:
        self.outline.append((example[0], atom.at))

    def _begin_op(
        self, atom: SettledAtom, example: tuple[Op, Any, str, int], blocks: Sequence[int]
    ) -> None: ...

    def _end_op(self, *_: Any) -> None: ...

    def _touch(
        self, atom: SettledAtom, example: tuple[Any, int | None], blocks: Sequence[int]
    ) -> None:
        number = self._find(atom, example, blocks)
        if example[0] is Freed:
            self.outline.append((Freed(number), atom.at))


class Writer(Outline):
    """Writes atoms as a recording of a model with these blocks."""

    def __init__(
        self, examples: Sequence[Any], blocks: Blocks, sizes: Sequence[int], like: Recording
    ) -> None:
        super().__init__(examples, blocks)
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.marks: list[int] = []
        self._sizes = sizes
        self._block_bytes = like.block_bytes
        self._workspaces = like.workspaces
        self._reads: list[tuple[int, int]] = []
        self._writes: list[tuple[int, int]] = []

    def _mark(self, *_: Any) -> None:
        self.marks.append(len(self.events))

    def _enter(self, _: SettledAtom, example: Entered, __: Sequence[int]) -> None:
        self.events.append(example)

    def _allocate(
        self, atom: SettledAtom, example: tuple[Storage, Any, Any], blocks: Sequence[int]
    ) -> None:
        like, module, layer = example
        requested = self._sizes[atom.at]
        rank = len(like.shape)
        self.events.append(Allocated(self.storage_count))
        in_module, in_layer = self._add_storage(atom, example, blocks)
        self.storages.append(
            Storage(
                nbytes=-(-requested // self._block_bytes) * self._block_bytes,
                op=like.op,
                phase=like.phase,
                module=join(module, in_module),
                requested=requested,
                shape=tuple(self._sizes[atom.at + 1 : atom.at + 1 + rank]),
                code=like.code,
                function=like.function,
                instruction=like.instruction,
                node=like.node,
                sampler=like.sampler,
                recomputed=like.recomputed,
                roles=like.roles,
                layer=join(layer, in_layer),
            )
        )

    def _launch(
        self, atom: SettledAtom, example: tuple[Launched, Any], blocks: Sequence[int]
    ) -> None:
        like, module = example
        sizes = tuple(self._sizes[atom.at : atom.at + len(like.sizes)])
        start = self.storage_count
        for requested in find_workspaces(like, sizes, self._workspaces):
            nbytes = -(-requested // self._block_bytes) * self._block_bytes
            inside = join(module, blocks[0] if blocks else None)
            self.events.append(Allocated(self.storage_count))
            self.storages.append(
                Storage(nbytes, like.op, like.phase, inside, requested, roles={"workspace"})
            )
            self.storage_count += 1
        self.events += map(Freed, range(start, self.storage_count))

    def _begin_op(
        self, atom: SettledAtom, example: tuple[Op, Any, str, int], blocks: Sequence[int]
    ) -> None:
        like, module, call, lists = example
        count = 2 + lists + 2 * _SIZES_OF_ATTENTION + call.count(_GAP)
        sizes = iter(self._sizes[atom.at : atom.at + count])
        cost = like.cost._replace(flops=next(sizes), is_aligned=bool(next(sizes)))
        counts = [next(sizes) for _ in range(lists)]
        if cost.product is not None:
            cost = cost._replace(product=(next(sizes), next(sizes), next(sizes), next(sizes)))
        if cost.attention is not None:
            heads, queries, keys, width = (next(sizes) for _ in range(_SIZES_OF_ATTENTION))
            shape = cost.attention._replace(heads=heads, queries=queries, keys=keys, width=width)
            cost = cost._replace(attention=shape)
        call = _put_numbers(call, sizes)
        self._op = like._replace(
            module=join(module, blocks[0] if blocks else None),
            cost=cost,
            call=_unfold(call, counts) if counts else call,
        )

    def _end_op(self, *_: Any) -> None:
        self.events.append(self._op._replace(reads=self._reads, writes=self._writes, at_s=0.0))
        self._reads, self._writes = [], []

    def _touch(
        self, atom: SettledAtom, example: tuple[Any, int | None], blocks: Sequence[int]
    ) -> None:
        what, _ = example
        number = self._find(atom, example, blocks)
        if what in _TOUCHING:
            self.events.append(what(number))
        else:
            moved = self._reads if what == _READ else self._writes
            moved.append((number, self._sizes[atom.at]))
