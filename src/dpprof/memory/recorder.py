"""What happens to memory while a step runs: storages born and died, operators that ran.

One dispatch mode for real and fake tensors. It sees every operator below autograd and
below ``torch.func``, in forward, backward, clipping, noise and optimizer alike. A view or an
in-place operator returns a storage that is known already, so nothing counts twice. What
is noted are numbers and names, never a tensor.
"""

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.flops.op_costs import Cost, Rule, learn_rule
from dpprof.flops.op_kinds import EINSUMS, Scope, kind_of_op
from dpprof.methods.tensors import tensors_in
from dpprof.norms.code_paths import CodePath, finds_norms
from dpprof.records.births import HELPERS
from dpprof.records.terms import OpKind, Phase

_DEVICE_OF = torch.ops.prim.device.default
_next_sequence_nr = torch._C._autograd._get_sequence_nr  # noqa: SLF001 (no public name)
_current_node = torch._C._current_autograd_node  # noqa: SLF001
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_NAMED_IN_TORCH = ("/optim/", "/_expanded_weights/")
"""Parts of torch whose functions are worth a name; the rest is plumbing."""

_EINSUMS = {getattr(torch.functional, name).__code__ for name in EINSUMS}
_OF_EINSUMS = frozenset({"bmm", "mm", "mul", "sum", "clone"})
"""What they come down to; to look for who called takes longer than to note the operator."""


class Storage:
    """One storage's birth certificate, and what is learned about it later."""

    __slots__ = (
        "again",
        "code",
        "function",
        "module",
        "nbytes",
        "node",
        "op",
        "phase",
        "roles",
        "sampler",
        "shape",
    )

    def __init__(self, nbytes: int, op: str, phase: Phase, module: str | None) -> None:
        self.nbytes = nbytes
        self.op = op
        self.phase = phase
        self.module = module
        self.shape: tuple[int, ...] = ()
        self.code: CodeType | None = None
        self.function: str | None = None
        self.node: str | None = None
        self.sampler: CodePath | None = None
        self.again = False
        self.roles: set[str] = set()


class Op(NamedTuple):
    """An operator that ran, with what it cost."""

    phase: Phase
    module: str | None
    op_kind: OpKind
    cost: Cost
    reads: Sequence[tuple[int, int]]
    """Storage and bytes, one for each tensor; a storage that was never born is -1."""

    writes: Sequence[tuple[int, int]]
    at_s: float


class Born(NamedTuple):
    """A storage was allocated."""

    number: int
    """Its place in ``Recorder.storages``, as for the events that follow."""


class Died(NamedTuple):
    """A storage was freed."""

    number: int


class Saved(NamedTuple):
    """Autograd keeps a storage for backward."""

    number: int


class Unsaved(NamedTuple):
    """Autograd lets go of a storage, or of one of the tensors on it that it kept."""

    number: int


class Entered(NamedTuple):
    """A phase began."""

    phase: Phase


Event = Born | Died | Saved | Unsaved | Entered | Op


class _Death(weakref.ref[torch.UntypedStorage]):
    """Tells the recorder when a storage is gone."""

    __slots__ = ("key", "number")
    key: int
    number: int


Workspace = Callable[..., int]
"""From an operator's arguments to the bytes that its kernel takes and gives back."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes events while it is active.

    Args:
        block_bytes: The allocator rounds sizes up to multiples of this.
        is_there: Whether a tensor lives in the memory that is accounted for.
        instead: What to run in place of operators that cannot run, by overload.
        workspaces: What kernels take and give back unseen, by overload packet.
    """

    def __init__(
        self,
        *,
        block_bytes: int = 1,
        is_there: Callable[[Tensor, Phase], bool],
        instead: Mapping[Any, Callable[..., Any]] | None = None,
        workspaces: Mapping[Any, Workspace] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.phase: Phase = "setup"
        self.modules: list[str | None] = []
        """Names of the modules whose forward is under way, innermost last."""

        self.sampler: tuple[CodePath, str] | None = None
        """Path and layer of the sampler under way: nothing tells of it but its caller."""

        self.notes: Mapping[str, str] = {}
        """What was chosen for a device that is not there, and why."""

        self.counting = False
        """Whether operators are noted with their costs."""

        self._block = block_bytes
        self._is_there = is_there
        self._instead = dict(instead or {})
        self._workspaces = dict(workspaces or {})
        self._alive: dict[int, _Death] = {}
        self._module_of_node: dict[int, str | None] = {}
        self._rules: dict[Any, Rule] = {}
        self._names: dict[CodeType, str | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: nothing is compiled here, and skipping it costs something for every operator."""
        return False

    def enter(self, phase: Phase) -> None:
        """Note that a phase begins."""
        self.phase = phase
        self.events.append(Entered(phase))

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of the storage under a tensor, or None if it is not known."""
        try:
            death = self._alive.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
            return None
        return None if death is None else death.number

    def give_role(self, tensor: Tensor, role: str) -> None:
        """Note that a tensor was seen in a role."""
        number = self.find(tensor)
        if number is not None:
            self.storages[number].roles.add(role)

    def claim(self, nbytes: int, op: str) -> None:
        """Note memory that a library takes for good, where no tensor stands for it."""
        taken = Storage(self._round(nbytes), op, self.phase, None)
        taken.roles.add("workspace")
        self.storages.append(taken)
        self.events.append(Born(len(self.storages) - 1))

    def note_saved(self, number: int, saved: bool) -> None:
        """Note that autograd keeps a storage for backward, or lets go of it."""
        self.events.append(Saved(number) if saved else Unsaved(number))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note what it did."""
        if func is _DEVICE_OF:  # half of all calls under fake tensors
            device = getattr(args[0], "fake_device", None)
            return func(*args) if device is None else device
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = learn_rule(func)
        out = self._instead.get(func, func)(*args, **kwargs)
        if self.modules and (_current_node() is None or self.modules[-1] is not None):
            self._module_of_node[_next_sequence_nr() - 1] = self.modules[-1]
        if not rule.is_view:
            for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
                self._note_birth(tensor, rule.name)
        if rule.packet in self._workspaces:
            self._note_workspace(rule.name, self._workspaces[rule.packet](*args, **kwargs))
        if self.counting and not rule.is_free:
            self._note_cost(rule, args, kwargs, out)
        return out

    def _note_cost(self, rule: Rule, args: Any, kwargs: Any, out: Any) -> None:
        cost, reads, writes = rule.price(args, kwargs, out)
        op = Op(
            self.phase,
            self._module(),
            kind_of_op(cost.family, self.phase, self._scope(rule.name)),
            cost,
            [(self._number(tensor), size) for tensor, size in reads],
            [(self._number(tensor), size) for tensor, size in writes],
            time.perf_counter(),
        )
        self.events.append(op)

    def _number(self, tensor: Tensor) -> int:
        number = self.find(tensor)
        return -1 if number is None else number

    def _note_birth(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (what StorageWeakRef uses too)
        if key in self._alive:
            return
        nbytes = storage.nbytes()
        if nbytes == 0 or not self._is_there(tensor, self.phase):
            return
        death = _Death(storage, self._note_death)
        death.key = key
        death.number = len(self.storages)
        self._alive[key] = death
        born = Storage(self._round(nbytes), op, self.phase, self._module())
        born.shape = tuple(tensor.shape)
        if self.sampler is not None:
            path, born.module = self.sampler
            born.sampler = path
        born.code, born.function = self._function()
        node = _current_node()
        born.again = self._is_again(node)
        born.node = None if node is None or born.again else node.name()
        self.storages.append(born)
        self.events.append(Born(death.number))

    def _note_death(self, death: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(death, _Death)
        if self._alive.get(death.key) is death:
            del self._alive[death.key]
        self.events.append(Died(death.number))

    def _note_workspace(self, op: str, nbytes: int) -> None:
        if nbytes:
            taken = Storage(self._round(nbytes), op, self.phase, self._module())
            taken.roles.add("workspace")
            number = len(self.storages)
            self.storages.append(taken)
            self.events += [Born(number), Died(number)]

    def _round(self, nbytes: int) -> int:
        return -(-nbytes // self._block) * self._block

    def _is_again(self, node: Any) -> bool:
        """Tell whether a module's forward is under way within backward: checkpointing's second."""
        return node is not None and bool(self.modules) and self.modules[-1] is not None

    def _module(self) -> str | None:
        """Name the module whose forward is under way, or whose backward is."""
        node = _current_node()
        if node is not None and not self._is_again(node):
            return self._module_of_node.get(node._sequence_nr())  # noqa: SLF001
        return self.modules[-1] if self.modules else None

    def _scope(self, op: str) -> Scope | None:
        """Tell who called, where that decides what the operator is for."""
        if self.sampler is not None and finds_norms(self.sampler[0]):
            return "norm"
        if op not in _OF_EINSUMS:
            return None
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 (the documented way to the stack)
        while frame is not None:
            if frame.f_code in _EINSUMS:
                return "einsum"
            frame = frame.f_back
        return None

    def _function(self) -> tuple[CodeType, str] | tuple[None, None]:
        """Find the innermost function that is not plumbing: its code, and ``module:function``."""
        frame = sys._getframe(2)  # noqa: SLF001 (the documented way to the stack)
        while frame is not None:
            code = frame.f_code
            if code not in self._names:
                self._names[code] = _name(code, frame.f_globals.get("__name__", ""))
            name = self._names[code]
            if name is not None:
                return code, name
            frame = frame.f_back  # type: ignore[assignment]
        return None, None


def _name(code: CodeType, module: str) -> str | None:
    """Name a function, ``module:function``; None for plumbing."""
    file = code.co_filename
    plumbing = (
        code in HELPERS
        or file.startswith((_OWN, "<"))
        or (file.startswith(_TORCH) and not any(part in file for part in _NAMED_IN_TORCH))
    )
    # A comprehension or a nested function counts as the function that it is written in.
    return None if plumbing else f"{module}:{code.co_qualname.partition('.<locals>')[0]}"
