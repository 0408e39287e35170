"""Records of a training: its storages, and its events in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from dpprof.experiments.records.terms import OpKind, Phase
from dpprof.predict.flops.cost import Cost
from dpprof.private.norms.code_paths import CodePath

Workspace = Callable[..., Sequence[int]]
"""A function from an operator's arguments to the bytes of each allocation within its kernel."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage: where it was allocated, and in which roles its tensors were seen."""

    nbytes: int
    """Rounded up to the allocator's blocks."""

    op: str
    phase: Phase
    module: str | None
    requested: int = 0
    """The bytes that the allocator was asked for."""

    shape: tuple[int, ...] = ()
    code: CodeType | None = None
    function: str | None = None
    instruction: int = 0
    """Where in the code it was allocated."""

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
    call: str = ""
    """The call, described by ``flops.op_call``; empty where calls are not described."""

    name: str = ""
    """The operator's name, as in ``Storage.op``."""


class Allocated(NamedTuple):
    """A storage was allocated."""

    number: int
    """Its index in ``Recorder.storages``, as for the events below."""


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

    packet: Any
    """The operator's overload packet."""

    op: str
    arguments: Any
    """Its arguments, with ``TensorKind`` in place of tensors and ``int`` in place of numbers."""

    sizes: tuple[int, ...]
    """Shape and strides of each tensor, and each number, one after another."""

    phase: Phase
    module: str | None
    storages: int
    """How many storages it allocated, in the events that follow."""


class TensorKind(NamedTuple):
    """What a tensor is, apart from its sizes."""

    dtype: Any
    dimensions: int


Event = Allocated | Freed | Saved | Unsaved | Entered | Op
