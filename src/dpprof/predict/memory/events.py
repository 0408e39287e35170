"""Records of a training: its storages, its events in order, and the journal that has both."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.experiments.records.terms import OpKind, Phase
from dpprof.predict.flops.cost import Cost
from dpprof.private.contributions.sums import own_part
from dpprof.private.norms.code_paths import CodePath

Workspace = Callable[..., Sequence[int]]
"""A function from an operator's arguments to the bytes of each allocation within its kernel."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage: where it was allocated, and in which roles its tensors were seen."""

    nbytes: int  # rounded up to the allocator's blocks
    op: str
    phase: Phase
    module: str | None
    requested: int = 0  # the bytes that the allocator was asked for
    shape: tuple[int, ...] = ()
    code: CodeType | None = None
    function: str | None = None
    instruction: int = 0  # where in the code it was allocated
    node: str | None = None
    sampler: CodePath | None = None
    node_number: int | None = None
    recomputed: bool = False
    roles: set[str] = field(default_factory=set)
    layer: str | None = None
    """The module whose parameter it belongs to, where it was seen in such a role."""


class Op(NamedTuple):
    """An operator that ran, with what it cost."""

    phase: Phase
    module: str | None
    op_kind: OpKind
    cost: Cost
    reads: Sequence[tuple[int, int]]
    """Storage and bytes, one for each tensor; -1 for a storage that was not recorded."""

    writes: Sequence[tuple[int, int]]
    at_s: float
    call: str = ""  # the call, described by ``flops.op_call``; empty where calls are not described
    name: str = ""  # the operator's name, as in ``Storage.op``

    @property
    def moved_bytes(self) -> int:
        """The bytes that it reads and writes, each once."""
        return sum(size for _, size in (*self.reads, *self.writes))


class Allocated(NamedTuple):
    """A storage was allocated."""

    number: int  # its index in ``Recorder.storages``, as for the events below


class Freed(NamedTuple):
    """A storage was freed."""

    number: int


class Saved(NamedTuple):
    """Autograd keeps a storage for backward."""

    number: int


class Unsaved(NamedTuple):
    """Autograd releases one of the tensors of a storage that it kept."""

    number: int


class Entered(NamedTuple):
    """A phase began."""

    phase: Phase


class Launched(NamedTuple):
    """An operator ran whose kernel may have allocated memory of its own, and freed it."""

    packet: Any  # the operator's overload packet
    op: str
    arguments: Any
    """Its arguments, with ``TensorKind`` in place of tensors and ``int`` in place of numbers."""

    sizes: tuple[int, ...]  # shape and strides of each tensor, and each number, one after another
    phase: Phase
    module: str | None
    storages: int  # how many storages it allocated, in the events that follow


class TensorKind(NamedTuple):
    """What a tensor is, apart from its sizes."""

    dtype: Any
    dimensions: int


Event = Allocated | Freed | Saved | Unsaved | Entered | Op


EMPTY = -1  # the number of a storage that has no bytes at present


class Life(weakref.ref[torch.UntypedStorage]):
    """Says when a storage is freed, and which number it has until then."""

    __slots__ = ("key", "last", "layer", "number")
    key: int
    number: int
    last: int  # the last number, which it keeps while it is empty
    layer: str | None  # the layer whose parameter is gathered into it


class Journal:
    """Numbers storages, and writes down what happens to them; keeps none of them alive.

    Args:
        block_bytes: The allocator rounds sizes up to multiples of this.
    """

    def __init__(self, block_bytes: int) -> None:
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.phase: Phase = "setup"
        self.block_bytes = block_bytes
        self.alive: dict[int, Life] = {}
        """Storages that are not freed yet, by address."""

    def enter(self, phase: Phase) -> None:
        """Record that a phase begins."""
        self.phase = phase
        self.events.append(Entered(phase))

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of the storage under a tensor, or None if it is not known.

        For a ``DTensor`` this is the storage of this rank's shard.
        """
        try:
            life = self.alive.get(own_part(tensor).untyped_storage()._cdata)  # noqa: SLF001
        except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
            return None
        return None if life is None or life.number == EMPTY else life.number

    def give_role(self, tensor: Tensor, role: str, layer: str | None = None) -> None:
        """Record that a tensor was seen in a role, and with which module's parameter."""
        number = self.find(tensor)
        if number is not None:
            storage = self.storages[number]
            storage.roles.add(role)
            storage.layer = storage.layer or layer

    def give_layer(self, gathered: Tensor, layer: str) -> None:
        """Record with which module's parameter a tensor is gathered, now and after it is freed."""
        life = self.alive.get(gathered.untyped_storage()._cdata)  # noqa: SLF001 (as above)
        if life is not None:
            life.layer = self.storages[life.last].layer = layer

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the storage under a tensor, or -1 if it is not known."""
        number = self.find(tensor)
        return -1 if number is None else number

    def note_saved(self, number: int, saved: bool) -> None:
        """Record that autograd keeps a storage for backward, or releases it."""
        self.events.append(Saved(number) if saved else Unsaved(number))

    def move(self, old: Tensor, new: Tensor) -> None:
        """Give a new storage the number of an old one, as if both were one."""
        storage = old.untyped_storage()
        life = self.alive.pop(storage._cdata)  # noqa: SLF001 (as below)
        self.follow(new.untyped_storage(), life.number)

    def follow(self, storage: torch.UntypedStorage, number: int) -> None:
        """Record from now on what happens to a storage, under a number."""
        life = Life(storage, self._note_freed)
        life.key = storage._cdata  # noqa: SLF001 (what StorageWeakRef uses too)
        life.number = life.last = number
        life.layer = None
        self.alive[life.key] = life

    def allocate(self, op: str, nbytes: int, module: str | None, **details: Any) -> Storage:
        """Record that a storage is allocated, as the next number."""
        rounded = -(-nbytes // self.block_bytes) * self.block_bytes
        storage = Storage(rounded, op, self.phase, module, nbytes, **details)
        self.storages.append(storage)
        self.events.append(Allocated(len(self.storages) - 1))
        return storage

    def _note_freed(self, life: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(life, Life)
        if self.alive.get(life.key) is life:
            del self.alive[life.key]
        if life.number != EMPTY:
            self.events.append(Freed(life.number))
