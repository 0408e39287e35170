"""Writes atoms as the record of a training, or as an outline of what it allocates and frees."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dpprof.predict.memory.atoms import ENDED, READ, SIZES_OF_ATTENTION, AlikeStorages, Recording
from dpprof.predict.memory.call_sizes import count_numbers, put_sizes
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
)
from dpprof.predict.memory.launches import find_workspaces
from dpprof.subjects.models.blocks import Blocks, join

Outlined = tuple[Any, int] | None
"""An allocation, a release or the launch of a kernel, and where its sizes are; None where a step
begins or ends."""


class SettledAtom(NamedTuple):
    """An atom whose blocks and storage are named in one way."""

    key: int
    blocks: Sequence[tuple[int, int]]
    """The way and the name of each."""

    storage: tuple[int, int] | None
    start: int
    """Where its sizes begin among those of all atoms."""


_Write = Callable[[Any, SettledAtom, Any, Sequence[int]], None]
"""A method that writes an atom that is like an example, with the blocks that it names."""


class Outline:
    """Writes what atoms allocate and free in a model with these blocks, without sizes."""

    def __init__(self, examples: Sequence[Any], blocks: Blocks) -> None:
        self.outline: list[Outlined] = []
        self.storage_count = 0
        self._writers = [(self._writer_of(example), example) for example in examples]
        self._starts = [0, 0, blocks.count]
        self._alike = AlikeStorages()

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
        return kinds.get(type(example[0]), cls._end_op if example[0] == ENDED else cls._touch)

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
        self.outline.append((Allocated(self.storage_count), atom.start))
        self._add_storage(atom, example, blocks)

    def _launch(self, atom: SettledAtom, example: tuple[Launched, Any], _: Sequence[int]) -> None:
        self.outline.append((example[0], atom.start))

    def _begin_op(
        self, atom: SettledAtom, example: tuple[Op, Any, str, int], blocks: Sequence[int]
    ) -> None: ...

    def _end_op(self, *_: Any) -> None: ...

    def _touch(
        self, atom: SettledAtom, example: tuple[Any, int | None], blocks: Sequence[int]
    ) -> None:
        number = self._find(atom, example, blocks)
        if example[0] is Freed:
            self.outline.append((Freed(number), atom.start))


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
        requested = self._sizes[atom.start]
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
                shape=tuple(self._sizes[atom.start + 1 : atom.start + 1 + rank]),
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
        sizes = tuple(self._sizes[atom.start : atom.start + len(like.sizes)])
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
        count = 2 + lists + 2 * SIZES_OF_ATTENTION + count_numbers(call)
        sizes = iter(self._sizes[atom.start : atom.start + count])
        cost = like.cost._replace(flops=next(sizes), is_aligned=bool(next(sizes)))
        lengths = [next(sizes) for _ in range(lists)]
        if cost.product is not None:
            cost = cost._replace(product=(next(sizes), next(sizes), next(sizes), next(sizes)))
        if cost.attention is not None:
            heads, queries, keys, width = (next(sizes) for _ in range(SIZES_OF_ATTENTION))
            shape = cost.attention._replace(heads=heads, queries=queries, keys=keys, width=width)
            cost = cost._replace(attention=shape)
        self._op = like._replace(
            module=join(module, blocks[0] if blocks else None),
            cost=cost,
            call=put_sizes(call, lengths, sizes),
        )

    def _end_op(self, *_: Any) -> None:
        self.events.append(self._op._replace(reads=self._reads, writes=self._writes, at_s=0.0))
        self._reads, self._writes = [], []

    def _touch(
        self, atom: SettledAtom, example: tuple[Any, int | None], blocks: Sequence[int]
    ) -> None:
        what, _ = example
        number = self._find(atom, example, blocks)
        if what in (Freed, Saved, Unsaved):
            self.events.append(what(number))
        else:
            moved = self._reads if what == READ else self._writes
            moved.append((number, self._sizes[atom.start]))
