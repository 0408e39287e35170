"""Lays atoms out in a model with so many blocks, and fills their sizes in."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpprof.predict.memory.allocator_replay import Footprint
from dpprof.predict.memory.atoms import READ, SIZES_OF_ATTENTION, WRITTEN, AlikeStorages, Recording
from dpprof.predict.memory.call_sizes import count_numbers, find_workspaces, put_sizes
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
from dpprof.subjects.models.blocks import Blocks, join

Integers = npt.NDArray[np.int64]


class SettledAtom(NamedTuple):
    """An atom whose blocks and storage are named in one way."""

    key: int
    blocks: Sequence[tuple[int, int]]  # the way and the name of each
    storage: tuple[int, int] | None
    start: int  # where its sizes begin among those of all atoms


class _Stored(NamedTuple):
    """A storage like another one, of these modules."""

    like: Storage
    module: str | None
    layer: str | None
    start: int

    def fill(self, sizes: Sequence[int], block_bytes: int) -> Storage:
        requested, start = sizes[self.start], self.start + 1
        return replace(
            self.like,
            nbytes=-(-requested // block_bytes) * block_bytes,
            module=self.module,
            requested=requested,
            shape=tuple(sizes[start : start + len(self.like.shape)]),
            layer=self.layer,
        )


class _Launch(NamedTuple):
    """The launch of a kernel that allocates memory of its own."""

    like: Launched
    module: str | None
    start: int


class _Ran(NamedTuple):
    """An operator that ran. What it reads and writes are storages and places of sizes."""

    like: Op
    module: str | None
    call: str
    lists: int
    start: int
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]

    def fill(self, of_all: Sequence[int]) -> Op:
        count = 2 + self.lists + 2 * SIZES_OF_ATTENTION + count_numbers(self.call)
        sizes = iter(of_all[self.start : self.start + count])
        cost = self.like.cost._replace(flops=next(sizes), is_aligned=bool(next(sizes)))
        lengths = [*islice(sizes, self.lists)]
        if cost.product is not None:
            cost = cost._replace(product=(next(sizes), next(sizes), next(sizes), next(sizes)))
        if cost.attention is not None:
            heads, queries, keys, width = islice(sizes, SIZES_OF_ATTENTION)
            shape = cost.attention._replace(heads=heads, queries=queries, keys=keys, width=width)
            cost = cost._replace(attention=shape)
        return self.like._replace(
            module=self.module,
            cost=cost,
            reads=[(number, of_all[place]) for number, place in self.reads],
            writes=[(number, of_all[place]) for number, place in self.writes],
            at_s=0.0,
            call=put_sizes(self.call, lengths, sizes),
        )


_Item = Event | _Launch | _Ran | None  # None where a step begins or ends


class Layout:
    """The record of a model with these blocks, without sizes."""

    def __init__(self, examples: Sequence[Any], blocks: Blocks) -> None:
        self._examples = examples
        self._starts = [0, 0, blocks.count]
        self._alike = AlikeStorages()
        self._storages: list[_Stored] = []
        self._items: list[_Item] = []

    def write(self, atoms: Iterable[SettledAtom]) -> None:
        """Append atoms.

        Raises:
            NotAlikeError: One uses a storage that does not exist.
        """
        for atom in atoms:
            waiting = (self._go_to(*place) for place in atom.blocks)
            match self._examples[atom.key]:
                case (str() | type() as what, kind):
                    self._touch(atom, what, kind, next(waiting, None))
                case (Op() as like, module, call, lists):
                    inside = join(module, next(waiting, None))
                    self._items.append(_Ran(like, inside, call, lists, atom.start, [], []))
                case (Storage() as like, module, layer):
                    in_module = next(waiting) if module and "{}" in module else None
                    in_layer = next(waiting) if layer and "{}" in layer else None
                    number = len(self._storages)
                    self._alike.add(number, atom.key, in_module if in_layer is None else in_layer)
                    names = join(module, in_module), join(layer, in_layer)
                    self._storages.append(_Stored(like, *names, atom.start))
                    self._items.append(Allocated(number))
                case (Launched() as like, module):
                    self._items.append(_Launch(like, join(module, next(waiting, None)), atom.start))
                case Entered() | None as item:
                    self._items.append(item)

    def _go_to(self, way: int, name: int) -> int:
        self._starts[0] = self._starts[way] + name
        return self._starts[0]

    def _touch(self, atom: SettledAtom, what: Any, kind: int | None, block: int | None) -> None:
        """Note that something happens to a storage, whose number is -1 if it is not known."""
        number = -1
        if kind is not None:
            assert atom.storage is not None
            number = self._alike.find(kind, block, *atom.storage)
            self._alike.follow(number, what)
        if what in (Freed, Saved, Unsaved):
            self._items.append(what(number))
        elif what in (READ, WRITTEN):
            ran = self._items[-1]
            assert isinstance(ran, _Ran)
            (ran.reads if what == READ else ran.writes).append((number, atom.start))

    def _play(
        self, items: Iterable[_Item], sizes: Sequence[int], like: Recording
    ) -> tuple[list[Event], list[int], list[tuple[_Launch, int]]]:
        """Return events, the marks among them, and what each storage of a kernel requests.

        Storages of kernels have the numbers after those of all others.
        """
        events: list[Event] = []
        marks: list[int] = []
        of_kernels: list[tuple[_Launch, int]] = []
        # Most launches repeat those of another block, so what they allocate is found once.
        workspaces: dict[tuple[int, ...], list[int]] = {}
        for item in items:
            if item is None:
                marks.append(len(events))
            elif isinstance(item, _Ran):
                events.append(item.fill(sizes))
            elif isinstance(item, _Launch):
                shapes = tuple(sizes[item.start : item.start + len(item.like.sizes)])
                key = id(item.like), *shapes
                if key not in workspaces:
                    workspaces[key] = find_workspaces(item.like, shapes, like.workspaces)
                first = len(self._storages) + len(of_kernels)
                of_kernels += [(item, requested) for requested in workspaces[key]]
                numbers = range(first, len(self._storages) + len(of_kernels))
                events += [*map(Allocated, numbers), *map(Freed, numbers)]
            else:
                events.append(item)
        return events, marks, of_kernels

    def record(self, sizes: Sequence[int], like: Recording) -> Recording:
        """Return the record with these sizes; what they say nothing of is as in another record."""
        events, marks, of_kernels = self._play(self._items, sizes, like)
        storages = [stored.fill(sizes, like.block_bytes) for stored in self._storages]
        for launch, requested in of_kernels:
            nbytes = -(-requested // like.block_bytes) * like.block_bytes
            made_by = launch.like.op, launch.like.phase, launch.module
            storages.append(Storage(nbytes, *made_by, requested, roles={"workspace"}))
        first, first_end, steady, end = marks
        return like._replace(
            storages=storages,
            events=events,
            marks=(first, first_end, steady, end),
            launches=(),
        )

    def footprint(self, sizes: Sequence[int], like: Recording) -> Footprint:
        """Return what the record with these sizes allocates and frees."""
        events, (*_, steady, end), of_kernels = self._play(self._changes, sizes, like)
        requested = [sizes[stored.start] for stored in self._storages]
        requested += [nbytes for _, nbytes in of_kernels]
        steps = events[:steady], events[steady:end]
        return Footprint(*steps, requested, like.block_bytes, like.is_graph)

    @cached_property
    def _changes(self) -> list[_Item]:
        kinds = Allocated | Freed | _Launch
        return [item for item in self._items if item is None or isinstance(item, kinds)]

    @cached_property
    def places(self) -> Integers:
        """The places of the sizes on which a footprint rests."""
        places = [stored.start for stored in self._storages]
        for item in self._changes:
            if isinstance(item, _Launch):
                places += range(item.start, item.start + len(item.like.sizes))
        return np.array(places, dtype=np.int64)
