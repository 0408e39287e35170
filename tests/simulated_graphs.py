"""CUDA graphs without a GPU: the operators of a function, run again on the same tensors.

What a real graph has is kept: nothing of Python runs again, numbers are those of the capture, every
tensor stays where it is, and capturing changes nothing. What waits for the device is refused.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import FORBIDDEN_CUDAGRAPH_OPS
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.private.capture import step_graphs
from dpprof.private.norms import linear, triton_ops
from dpprof.private.norms.placement import as_if_on_cuda
from dpprof.subjects.methods import standard

_WAITS = {
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"),
        *("__index__", "__array__"),
    )
}


class _Refusing(TorchFunctionMode):
    """Refuses what waits for the device: a dispatch mode does not see all of it."""

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        if function in _WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        return function(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Records operators, and what tensors that were there before held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if str(func) in FORBIDDEN_CUDAGRAPH_OPS or torch.Tag.cudagraph_unsafe in func.tags:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if any(one.alias_info and one.alias_info.is_write for one in func._schema.arguments):
            for tensor in _tensors((args, kwargs)):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made and storage._cdata not in self.before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self.before[storage._cdata] = whole, whole.clone()
        frozen = _alias((args, kwargs))  # some operators change the shape of what they are given
        out = func(*args, **kwargs)
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        made = _tensors(out)
        storages = {one.untyped_storage()._cdata for one in made}
        self._made |= storages - given
        self.calls.append((func, *frozen, _alias(made)))
        return out


def _alias(values: Any) -> Any:
    """Copy what an operator got or gave, with tensors of their own on the same storage."""
    if isinstance(values, Tensor):
        return values.detach()
    if isinstance(values, dict):
        return {name: _alias(value) for name, value in values.items()}
    return type(values)(map(_alias, values)) if type(values) in {list, tuple} else values


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]


class SimulatedGraphs:
    """Stands for ``CudaGraphs``."""

    captured = 0
    """How many functions all of them have captured."""

    def __init__(
        self, _device: torch.device, list_generators: Callable[[], Iterable[torch.Generator]]
    ) -> None:
        self._list_generators = list_generators

    def warm_up(self, function: Callable[[], object], undo: Callable[[], object]) -> None:
        for refusing in (nullcontext(), _Refusing()):
            with refusing:
                function()
            undo()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        type(self).captured += 1
        generators = [*self._list_generators(), torch.default_generator]
        states = [one.get_state() for one in generators]
        recording = _Recording()
        with _Refusing(), recording:
            output = function()
        with torch.no_grad():
            for tensor, held in recording.before.values():
                tensor.copy_(held)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

        @torch.no_grad()
        def replay() -> None:
            for func, args, kwargs, out in recording.calls:
                again = func(*_alias(args), **_alias(kwargs))
                for old, new in zip(out, _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay, output


def _bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply with a result of another dtype, which PyTorch does on CUDA alone."""
    return torch.ops.aten.bmm(a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype))


@contextmanager
def simulated_graphs(monkeypatch) -> Iterator[None]:
    """Let steps be captured inside the context, on the CPU as if it was a GPU without Triton."""

    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    monkeypatch.setattr(step_graphs, "CudaGraphs", SimulatedGraphs)
    monkeypatch.setattr(standard, "CudaGraphs", SimulatedGraphs)
    monkeypatch.setattr(SimulatedGraphs, "captured", 0)
    monkeypatch.setattr(torch, "bmm", _bmm)
    for module in (linear, triton_ops):
        monkeypatch.setattr(module, "is_fused", lambda _: False)
    with as_if_on_cuda():
        yield
