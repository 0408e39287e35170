"""Records the storages that a step allocates and frees, and the operators that run.

One dispatch mode for real and fake tensors. It sees every operator below autograd and below
``torch.func``, in every phase. A view or an in-place operator returns a known storage, so nothing
counts twice. The recorder keeps sizes and names, never a tensor.
"""

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.experiments.records.terms import Phase
from dpprof.predict.flops.cost import EINSUMS, Scope, kind_of_op
from dpprof.predict.flops.op_call import describe_call
from dpprof.predict.flops.op_costs import OperatorRule, learn_rule
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
from dpprof.predict.memory.exchanged_tensors import (
    Roles,
    around_propagation,
    find_roles,
    takes_dtensors,
)
from dpprof.predict.memory.in_place_backward import (
    INTO_FRESH,
    count_engines_references,
    find_in_place,
)
from dpprof.predict.memory.operand_copies import OPERAND_COPIES
from dpprof.predict.memory.quantized_operators import PARTS
from dpprof.predict.memory.wrapped_numbers import WRAPPING
from dpprof.private.allocation_marks import HELPERS
from dpprof.private.contributions.sums import own_part
from dpprof.private.norms.code_paths import CodePath, finds_norms
from dpprof.private.substitutes import substitute
from dpprof.subjects.methods.tensors import tensors_in
from dpprof.subjects.models.quantized import scales_of

_USES_HANDLE = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "mv", "addmv", "dot")
}
"""Operators that cuBLAS runs."""

_ADDMM = torch.ops.aten.addmm

_ADD = torch.ops.aten.add.Tensor
_DEVICE_OF = torch.ops.prim.device.default
_next_sequence_nr = torch._C._autograd._get_sequence_nr  # noqa: SLF001 (no public name)
_current_node = torch._C._current_autograd_node  # noqa: SLF001
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_NAMED_IN_TORCH = ("/optim/", "/_expanded_weights/", "/nn/parallel/")
"""Parts of torch whose functions are named; all other functions of torch are skipped."""

_resize = torch.UntypedStorage.resize_
_EMPTY = -1
"""The number of a storage that has no bytes at present."""

_EINSUMS = {getattr(torch.functional, name).__code__ for name in EINSUMS}
_OF_EINSUMS = frozenset({"bmm", "mm", "mul", "sum", "clone"})
"""The operators that einsum calls. Only for these is the stack searched, which is slow."""


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class _Finalizer(weakref.ref[torch.UntypedStorage]):
    """Tells the recorder that a storage was freed."""

    __slots__ = ("key", "last", "layer", "number")
    key: int
    number: int
    last: int
    """Its number before it was emptied, or else that."""

    layer: str | None
    """Whose parameter it is gathered into, each time that it is filled."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records events while it is active.

    Args:
        block_bytes: The allocator rounds sizes up to multiples of this.
        is_there: Whether a tensor is in the memory that is recorded.
        call: Runs an operator, given its arguments; None to call it.
        workspaces: Bytes that kernels allocate and free themselves, by overload packet.
    """

    def __init__(
        self,
        *,
        block_bytes: int = 1,
        is_there: Callable[[Tensor, Phase], bool],
        call: Callable[[Any, Any, Any], Any] | None = None,
        workspaces: Mapping[Any, Workspace] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.phase: Phase = "setup"
        self.modules: list[str | None] = []
        """Names of the modules whose forward is running, innermost last."""

        self.sampler: tuple[CodePath, str] | None = None
        """Path and layer of the sampler that is running; its caller sets it."""

        self.notes: Mapping[str, str] = {}
        """What was chosen for a simulated device, and why."""

        self.handles: dict[str, int] = {}
        """Bytes of workspaces that a thread has not allocated yet, by name
        (``simulated_cuda.library_workspaces``)."""

        self.counting = False
        """Whether operators are recorded with their costs."""

        self.describing = False
        """Whether their calls are described too, so that they can be made again."""

        self.launches: list[tuple[int, Launched]] | None = None
        """Where among the events such operators are; None to leave them out."""

        self.recording = True
        """Whether anything is recorded; not while a model is built that is loaded afterwards."""

        self.block_bytes = block_bytes
        self._is_there = is_there
        self._call = call or _call
        self.workspaces = dict(workspaces or {})
        self._roles = find_roles()
        self._alive: dict[int, _Finalizer] = {}
        self._module_of_node: dict[int, str | None] = {}
        self._names: dict[CodeType, str | None] = {}
        count_engines_references()  # before this mode is active

    def __enter__(self) -> Self:
        """Begin to record."""
        recorder = self  # a storage is bound as the first argument

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            return recorder._resize(storage, size)

        self._within = ExitStack()
        self._within.enter_context(substitute(torch.UntypedStorage, "resize_", resize))
        self._within.enter_context(around_propagation(self._pause))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Record nothing within."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def __exit__(self, *exception: object) -> None:
        """End recording."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._within.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and skipping slows every operator."""
        return False

    def load(self, module: nn.Module) -> None:
        """Record from now on, and first that a module's tensors are allocated, children first.

        That is the order in which ``module.to(device)`` allocates. Earlier records stay.
        """
        self.recording = True
        for child in module.children():
            self.load(child)
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        own += tuple(scales_of(module))
        for tensor in own:
            self._note_allocation(own_part(tensor), "_to_copy")

    def enter(self, phase: Phase) -> None:
        """Record that a phase begins."""
        self.phase = phase
        self.events.append(Entered(phase))

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of the storage under a tensor, or None if it is not known.

        For a ``DTensor`` this is the storage of this rank's shard.
        """
        try:
            finalizer = self._alive.get(own_part(tensor).untyped_storage()._cdata)  # noqa: SLF001
        except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
            return None
        return None if finalizer is None or finalizer.number == _EMPTY else finalizer.number

    def give_role(self, tensor: Tensor, role: str, layer: str | None = None) -> None:
        """Record that a tensor was seen in a role, and with which module's parameter."""
        number = self.find(tensor)
        if number is not None:
            storage = self.storages[number]
            storage.roles.add(role)
            storage.layer = storage.layer or layer

    def give_layer(self, gathered: Tensor, layer: str) -> None:
        """Record with which module's parameter a tensor is gathered, now and after it is freed."""
        finalizer = self._alive.get(gathered.untyped_storage()._cdata)  # noqa: SLF001 (as above)
        if finalizer is not None:
            finalizer.layer = self.storages[finalizer.last].layer = layer

    def _note_handles(self, *, has_bias: bool) -> None:
        """Record what libraries allocate with the first product of a thread, and never free."""
        thread = "forward" if _current_node() is None else "backward"
        for library in ("cuBLAS", "cuBLASLt") if has_bias else ("cuBLAS",):
            name = f"{library} workspace, {thread}"
            nbytes = self.handles.pop(name, 0)
            if nbytes:
                self._allocate(name, nbytes, None, roles={"workspace"})

    def note_saved(self, number: int, saved: bool) -> None:
        """Record that autograd keeps a storage for backward, or releases it."""
        self.events.append(Saved(number) if saved else Unsaved(number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it; a ``DTensor`` runs it on its shard, within this again."""
        if func is _DEVICE_OF:  # half of all calls under fake tensors
            device = getattr(args[0], "fake_device", None)
            return func(*args) if device is None else device
        if takes_dtensors(types):
            return NotImplemented
        if self.recording and func.namespace == "bitsandbytes" and func._opname in PARTS:  # noqa: SLF001
            with self._again():
                return PARTS[func._opname](*args, **(kwargs or {}))  # noqa: SLF001 (no public name)
        return self._run(func, args, kwargs or {})

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Record operators that are called within, although an operator is being recorded."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.recording:
            return self._call(func, args, kwargs)
        rule = learn_rule(func)
        in_place = self._find_in_place(func, args)
        out = self._call(func, args, kwargs)
        if in_place is not None:
            rule = learn_rule(in_place)
            self._move(args[0], out)
        if self.modules and (_current_node() is None or self.modules[-1] is not None):
            self._module_of_node[_next_sequence_nr() - 1] = self.modules[-1]
        if not rule.is_view:
            for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
                self._note_allocation(tensor, rule.name)
        if rule.packet in self._roles:
            self._note_roles(self._roles[rule.packet], args, kwargs)
        if self.handles and rule.packet in _USES_HANDLE:
            self._note_handles(has_bias=rule.packet is _ADDMM and args[0].dim() == 1)
        if rule.packet in self.workspaces:
            self._note_workspace(rule, args, kwargs)
        if self.counting and not rule.is_free:
            call = describe_call(in_place or func, args, kwargs) if self.describing else ""
            self._note_cost(rule, args, kwargs, out, call)
        return out

    def _note_roles(self, roles: Roles, args: Any, kwargs: Any) -> None:
        for key, role in roles.items():
            argument = kwargs.get(key) if isinstance(key, str) else args[key]
            for tensor in tensors_in(argument):
                self.give_role(tensor, role)

    def _note_cost(self, rule: OperatorRule, args: Any, kwargs: Any, out: Any, call: str) -> None:
        cost, reads, writes = rule.price(args, kwargs, out)
        op = Op(
            self.phase,
            self._module(),
            kind_of_op(cost.family, self.phase, self._scope(rule.name)),
            cost,
            [(self._number(tensor), size) for tensor, size in reads],
            [(self._number(tensor), size) for tensor, size in writes],
            time.perf_counter(),
            call,
            rule.name,
        )
        self.events.append(op)

    def _number(self, tensor: Tensor) -> int:
        number = self.find(tensor)
        return -1 if number is None else number

    def _find_in_place(self, func: Any, args: Any) -> Any:
        """Return the operator that would write in place in a bare run; None for none."""
        node = _current_node()
        if node is None or not (func is _ADD or func in INTO_FRESH):
            return None
        number = self.find(args[0]) if isinstance(args[0], Tensor) else None
        if number is None:
            return None
        fresh = self.storages[number].node_number == node._sequence_nr()  # noqa: SLF001
        return find_in_place(func, args, fresh=fresh)

    def _move(self, old: Tensor, new: Tensor) -> None:
        """Give a new storage the number of an old one, as if both were one."""
        storage = old.untyped_storage()
        finalizer = self._alive.pop(storage._cdata)  # noqa: SLF001 (as below)
        self._follow(new.untyped_storage(), finalizer.number)

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        finalizer = _Finalizer(storage, self._note_freed)
        finalizer.key = storage._cdata  # noqa: SLF001 (what StorageWeakRef uses too)
        finalizer.number = finalizer.last = number
        finalizer.layer = None
        self._alive[finalizer.key] = finalizer

    def _note_allocation(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:  # noqa: SLF001 (as above)
            return
        nbytes = storage.nbytes()
        if nbytes == 0 or not self._is_there(tensor, self.phase):
            return
        self._follow(storage, len(self.storages))
        new = self._allocate(op, nbytes, self._module(), shape=tuple(tensor.shape))
        if self.sampler is not None:
            new.sampler, new.module = self.sampler
        new.code, new.function, new.instruction = self._function()
        node = _current_node()
        new.recomputed = self._is_recomputing(node)
        if node is not None:
            new.node = None if new.recomputed else node.name()
            new.node_number = node._sequence_nr()  # noqa: SLF001 (no public name)

    def _allocate(self, op: str, nbytes: int, module: str | None, **details: Any) -> Storage:
        rounded = -(-nbytes // self.block_bytes) * self.block_bytes
        storage = Storage(rounded, op, self.phase, module, nbytes, **details)
        self.storages.append(storage)
        self.events.append(Allocated(len(self.storages) - 1))
        return storage

    def _note_freed(self, finalizer: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(finalizer, _Finalizer)
        if self._alive.get(finalizer.key) is finalizer:
            del self._alive[finalizer.key]
        if finalizer.number != _EMPTY:
            self.events.append(Freed(finalizer.number))

    def _resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Resize a storage and record it; no operator does it where FSDP frees what it gathered."""
        resized = _resize(storage, size)
        finalizer = self._alive.get(storage._cdata)  # noqa: SLF001 (as above)
        if finalizer is None:
            return resized
        before, nbytes = finalizer.number, storage.nbytes()
        finalizer.number = _EMPTY
        if nbytes:
            finalizer.number = finalizer.last = len(self.storages)
            new = self._allocate("resize_", nbytes, self._module(), layer=finalizer.layer)
            new.code, new.function, new.instruction = self._function()
            node = _current_node()
            new.recomputed = self._is_recomputing(node)
        if before != _EMPTY:
            self.events.append(Freed(before))
        return resized

    def _note_workspace(self, rule: OperatorRule, args: Any, kwargs: Any) -> None:
        packet = rule.packet
        find = self.workspaces[packet]
        requests = [*filter(None, find(*args, **kwargs))]
        if not requests and (packet in WRAPPING or OPERAND_COPIES.get(packet) is find):
            return
        before, module = len(self.storages), self._module()
        if self.launches is not None:
            sizes: list[int] = []
            arguments = describe_arguments((args, kwargs), sizes)
            launched = Launched(
                *(rule.packet, rule.name, arguments, tuple(sizes), self.phase, module),
                len(requests),
            )
            self.launches.append((len(self.events), launched))
        for requested in requests:
            self._allocate(rule.name, requested, module, roles={"workspace"})
        self.events += map(Freed, reversed(range(before, len(self.storages))))

    def _is_recomputing(self, node: Any) -> bool:
        """Return whether backward runs a module's forward a second time, as checkpointing does."""
        return node is not None and bool(self.modules) and self.modules[-1] is not None

    def _module(self) -> str | None:
        """Return the name of the module whose forward or backward is running."""
        node = _current_node()
        if node is not None and not self._is_recomputing(node):
            return self._module_of_node.get(node._sequence_nr())  # noqa: SLF001
        return self.modules[-1] if self.modules else None

    def _scope(self, op: str) -> Scope | None:
        """Return the caller, where the op kind depends on it."""
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

    def _function(self) -> tuple[CodeType, str, int] | tuple[None, None, int]:
        """Return code, name and instruction of the innermost function that ``_name`` names."""
        frame = sys._getframe(2)  # noqa: SLF001 (the documented way to the stack)
        while frame is not None:
            code = frame.f_code
            if code not in self._names:
                self._names[code] = _name(code, frame.f_globals.get("__name__", ""))
            name = self._names[code]
            if name is not None:
                return code, name, frame.f_lasti
            frame = frame.f_back  # type: ignore[assignment]
        return None, None, 0


def describe_arguments(value: Any, sizes: list[int]) -> Any:
    """Return arguments that can be compared; sizes of tensors, and numbers, go into a list."""
    if isinstance(value, Tensor):
        sizes += (*value.shape, *value.stride())
        return TensorKind(value.dtype, value.dim())
    if type(value) is int:
        sizes.append(value)
        return int
    if isinstance(value, list | tuple):
        return tuple(describe_arguments(item, sizes) for item in value)
    if isinstance(value, dict):
        return tuple((key, describe_arguments(item, sizes)) for key, item in value.items())
    return value


def _name(code: CodeType, module: str) -> str | None:
    """Return ``module:function``; None for the recorder, helpers, and most of torch."""
    file = code.co_filename
    is_skipped = (
        code in HELPERS
        or file.startswith((_OWN, "<"))
        or (file.startswith(_TORCH) and not any(part in file for part in _NAMED_IN_TORCH))
    )
    # Comprehensions and nested functions count as the function that contains them.
    return None if is_skipped else f"{module}:{code.co_qualname.partition('.<locals>')[0]}"
