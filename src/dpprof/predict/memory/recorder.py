"""Records the storages that a step allocates and frees, and the operators that run.

One dispatch mode for real and fake tensors. It sees every operator below autograd and below
``torch.func``, in every phase. A view or an in-place operator returns a known storage, so nothing
counts twice. The recorder keeps sizes and names, never a tensor.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.experiments.records.terms import Phase
from dpprof.predict.flops.cost import kind_of_op
from dpprof.predict.flops.op_call import describe_call
from dpprof.predict.flops.op_costs import OperatorRule, learn_rule
from dpprof.predict.memory.call_sizes import describe_arguments
from dpprof.predict.memory.callers import Callers
from dpprof.predict.memory.cpu_workspaces import OPERAND_COPIES, WRAPPING
from dpprof.predict.memory.events import EMPTY, Freed, Journal, Launched, Op, Workspace
from dpprof.predict.memory.exchanges import around_propagation, find_roles, takes_dtensors
from dpprof.predict.memory.in_place_backward import (
    INTO_FRESH,
    count_engines_references,
    find_in_place,
)
from dpprof.predict.memory.quantized_operators import PARTS
from dpprof.private.contributions.sums import own_part
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
_current_node = torch._C._current_autograd_node  # noqa: SLF001
_resize = torch.UntypedStorage.resize_


class Recorder(Journal, TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        Journal.__init__(self, block_bytes)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.callers = Callers()
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

        self._is_there = is_there
        self._call = call or (lambda func, args, kwargs: func(*args, **kwargs))
        self.workspaces = dict(workspaces or {})
        self._roles = find_roles()
        count_engines_references()  # before this mode is active

    def __enter__(self) -> Self:
        """Begin to record."""
        recorder = self  # a storage is bound as the first argument

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            return recorder._resize(storage, size)

        self._within = ExitStack()
        self._within.enter_context(substitute(torch.UntypedStorage, "resize_", resize))
        pause = partial(substitute, self, "recording", False)
        self._within.enter_context(around_propagation(pause))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

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

    def _note_handles(self, *, has_bias: bool) -> None:
        """Record what libraries allocate with the first product of a thread, and never free."""
        thread = "forward" if _current_node() is None else "backward"
        for library in ("cuBLAS", "cuBLASLt") if has_bias else ("cuBLAS",):
            name = f"{library} workspace, {thread}"
            nbytes = self.handles.pop(name, 0)
            if nbytes:
                self.allocate(name, nbytes, None, roles={"workspace"})

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
            self.move(args[0], out)
        self.callers.note_node()
        if not rule.is_view:
            for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
                self._note_allocation(tensor, rule.name)
        for key, role in self._roles.get(rule.packet, {}).items():
            for tensor in tensors_in(kwargs.get(key) if isinstance(key, str) else args[key]):
                self.give_role(tensor, role)
        if self.handles and rule.packet in _USES_HANDLE:
            self._note_handles(has_bias=rule.packet is _ADDMM and args[0].dim() == 1)
        if rule.packet in self.workspaces:
            self._note_workspace(rule, args, kwargs)
        if self.counting and not rule.is_free:
            call = describe_call(in_place or func, args, kwargs) if self.describing else ""
            self._note_cost(rule, args, kwargs, out, call)
        return out

    def _note_cost(self, rule: OperatorRule, args: Any, kwargs: Any, out: Any, call: str) -> None:
        cost, reads, writes = rule.price(args, kwargs, out)
        op = Op(
            self.phase,
            self.callers.module(),
            kind_of_op(cost.family, self.phase, self.callers.scope(rule.name)),
            cost,
            [(self.number_of(tensor), size) for tensor, size in reads],
            [(self.number_of(tensor), size) for tensor, size in writes],
            time.perf_counter(),
            call,
            rule.name,
        )
        self.events.append(op)

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

    def _note_allocation(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.alive:  # noqa: SLF001 (as above)
            return
        nbytes = storage.nbytes()
        if nbytes == 0 or not self._is_there(tensor, self.phase):
            return
        self.follow(storage, len(self.storages))
        new = self.allocate(op, nbytes, self.callers.module(), shape=tuple(tensor.shape))
        if self.callers.sampler is not None:
            new.sampler, new.module = self.callers.sampler
        new.code, new.function, new.instruction = self.callers.function()
        node = _current_node()
        new.recomputed = self.callers.is_recomputing(node)
        if node is not None:
            new.node = None if new.recomputed else node.name()
            new.node_number = node._sequence_nr()  # noqa: SLF001 (no public name)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Resize a storage and record it; no operator does it where FSDP frees what it gathered."""
        resized = _resize(storage, size)
        life = self.alive.get(storage._cdata)  # noqa: SLF001 (as above)
        if life is None:
            return resized
        before, nbytes = life.number, storage.nbytes()
        life.number = EMPTY
        if nbytes:
            life.number = life.last = len(self.storages)
            new = self.allocate("resize_", nbytes, self.callers.module(), layer=life.layer)
            new.code, new.function, new.instruction = self.callers.function()
            node = _current_node()
            new.recomputed = self.callers.is_recomputing(node)
        if before != EMPTY:
            self.events.append(Freed(before))
        return resized

    def _note_workspace(self, rule: OperatorRule, args: Any, kwargs: Any) -> None:
        packet = rule.packet
        find = self.workspaces[packet]
        requests = [*filter(None, find(*args, **kwargs))]
        if not requests and (packet in WRAPPING or OPERAND_COPIES.get(packet) is find):
            return
        before, module = len(self.storages), self.callers.module()
        if self.launches is not None:
            sizes: list[int] = []
            arguments = describe_arguments((args, kwargs), sizes)
            launched = Launched(
                *(rule.packet, rule.name, arguments, tuple(sizes), self.phase, module),
                len(requests),
            )
            self.launches.append((len(self.events), launched))
        for requested in requests:
            self.allocate(rule.name, requested, module, roles={"workspace"})
        self.events += map(Freed, reversed(range(before, len(self.storages))))
