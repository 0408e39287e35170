"""Reads the record of a training as a sequence of atoms.

An atom says that a storage is allocated or freed, that autograd keeps one or releases it, or that
an operator runs, reads or writes. It names a block by its distance from the block of the atom
before it, and a storage by its position among storages that are alike. So two blocks that compute
the same have equal atoms.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dpprof.predict.memory.call_sizes import take_sizes
from dpprof.predict.memory.events import (
    Allocated,
    Entered,
    Event,
    Freed,
    Launched,
    Op,
    Saved,
    Storage,
    Unsaved,
    Workspace,
)
from dpprof.subjects.models.blocks import Blocks, NotAlikeError


class Recording(NamedTuple):
    """What was recorded of a training: its set-up, its first step, and a later one."""

    storages: Sequence[Storage]
    events: Sequence[Event]
    marks: tuple[int, int, int, int]
    """Where in the events the first step begins and ends, and where the later one does."""

    notes: dict[str, str]
    block_bytes: int  # the allocator rounds sizes up to multiples of this
    launches: Sequence[tuple[int, Launched]] = ()
    """Where in the events kernels were launched that may allocate memory of their own."""

    workspaces: Mapping[Any, Workspace] = MappingProxyType({})
    """What they allocate, by overload packet."""

    is_graph: bool = False  # whether the later step is captured as a CUDA graph


class Place(NamedTuple):
    """A place, named in several ways; one of the names must be the same in all records."""

    by: tuple[int, ...]

    def shared_way(self, *others: "Place") -> int | None:
        """Return the first way in which this and others have the same name; None for none."""
        for way, value in enumerate(self.by):
            if all(other.by[way] == value for other in others):
                return way
        return None


class Atom(NamedTuple):
    """One thing that happens."""

    key: int  # equal for atoms that differ in nothing but blocks, storages and sizes
    blocks: tuple[Place, ...]
    """Each by its distance from the last block that was named, from the first block, and from the
    end."""

    storage: Place | None
    """Its position among storages that are alike, in the order in which they were allocated, or
    were last used; counted from the oldest, or from the newest."""

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


class AlikeStorages:
    """Groups storages that are alive, or that autograd keeps, by kind and block."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int | None], list[int]] = {}
        self._used: dict[tuple[int, int | None], list[int]] = {}
        self._group: dict[int, tuple[int, int | None]] = {}
        self._saved: Counter[int] = Counter()
        self._freed: set[int] = set()

    def add(self, number: int, kind: int, block: int | None) -> None:
        """Add a storage of a kind, allocated for a block."""
        group = self._group[number] = kind, block
        self._made.setdefault(group, []).append(number)
        self._used.setdefault(group, []).append(number)

    def group(self, number: int) -> tuple[int, int | None]:
        """Return the kind and the block of a storage."""
        return self._group[number]

    def locate(self, number: int) -> Place:
        """Return the position of a storage among those of its kind and block."""
        group = self._group[number]
        made, used = self._made[group], self._used[group]
        index, index_by_use, last = made.index(number), used.index(number), len(made) - 1
        return Place((index, last - index, index_by_use, last - index_by_use))

    def find(self, kind: int, block: int | None, way: int, position: int) -> int:
        """Return the storage at a position, counted in one of the ways of ``locate``."""
        by_use, from_newest = divmod(way, 2)
        members = (self._used if by_use else self._made).get((kind, block), [])
        index = len(members) - 1 - position if from_newest else position
        if not 0 <= index < len(members):
            raise NotAlikeError("a storage that is used does not exist")
        return members[index]

    def follow(self, number: int, event: type) -> None:
        """Note that a storage is freed, kept, released, or else used."""
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
    """Return events with each run of frees sorted by number, because Python frees in any order.

    No free crosses a border. Borders are places among the events.
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
    """Yield the places among the events where the allocations of each kernel begin and end."""
    for index, launched in launches:
        yield index
        yield index + 2 * launched.storages


READ, WRITTEN, ENDED = "read", "written", "ended"
SIZES_OF_ATTENTION = 4


class AtomReader:
    """Reads one recording of a model with these blocks."""

    def __init__(self, vocabulary: Vocabulary, blocks: Blocks) -> None:
        self._vocabulary = vocabulary
        self._blocks = blocks
        self._block = 0
        self._alike = AlikeStorages()
        self._atoms: list[Atom] = []

    def read(self, recording: Recording) -> Sequence[Atom]:
        """Return the atoms of the recording."""
        launches = deque(recording.launches)
        skipped = 0
        for index, event in enumerate(recording.events):
            self._mark(index, recording.marks)
            while launches and launches[0][0] == index:
                _, launched = launches.popleft()
                module, block = self._blocks.split(launched.module)
                key = ("launched", *launched[:3], launched.phase, module, block is None)
                self._add(key, (launched, module), (block,), sizes=launched.sizes)
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
        number, places = self._vocabulary.number(key, example), []
        for block in blocks:
            if block is not None:
                places.append(Place((block - self._block, block, block - self._blocks.count)))
                self._block = block
        self._atoms.append(Atom(number, tuple(places), storage, sizes))
        return number

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
        call, repeats, numbers = take_sizes(op.call)
        key = (
            *("ran", op.phase, module, op.op_kind, call, op.name, block is None, cost.op),
            *(cost.family, cost.dtype, cost.product is None),
            *(cost.formula_unknown, attention and attention[SIZES_OF_ATTENTION:], len(repeats)),
        )
        sizes = (
            cost.flops,
            int(cost.is_aligned),
            *repeats,
            *(cost.product or ()),
            *(attention or ())[:SIZES_OF_ATTENTION],
            *numbers,
        )
        self._add(key, (op, module, call, len(repeats)), (block,), sizes=sizes)
        for number, size in op.reads:
            self._touch(READ, number, size)
        for number, size in op.writes:
            self._touch(WRITTEN, number, size)
        self._add((ENDED,), (ENDED, None))
