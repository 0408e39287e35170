"""Runs operators on fake tensors, and remembers the shapes that each kind of call returns.

``FakeTensorMode`` remembers them too, but takes five times as long to look one up.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dpprof.predict.memory.library_workspaces import run_layer, run_layer_backward
from dpprof.private.norms.placement import is_simulated

aten = torch.ops.aten


def _unique_worst_case(x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``unique_dim`` returns if all slices differ, the largest result."""
    indices = x.new_empty((x.shape[dim],), dtype=torch.int64)
    return x.new_empty(x.shape), indices, x.new_empty((0,), dtype=torch.int64)


def _add_into(x: Tensor, other: Tensor, **options: Any) -> Tensor:
    """Return ``out`` at once where it has the shape of the sum."""
    out: Tensor = options["out"]
    return out if x.shape == other.shape == out.shape else aten.add.out(x, other, **options)


def _multiply_groups(
    a: Tensor, b: Tensor, offs: Tensor | None = None, _bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Return the products of groups in any dtype; PyTorch's own knows bfloat16 alone."""
    make: Any = _meta_registrations._create_grouped_mm_output_tensor  # noqa: SLF001 (no public name)
    product: Tensor = make(a, b, offs, out_dtype or a.dtype)
    return product


def _empty_after_group_norm(x: Tensor) -> Tensor:
    """Return a tensor laid out as the input is, on CUDA contiguous (group_norm.cpp)."""
    layout = torch.contiguous_format if is_simulated() else suggest_memory_format(x)
    return torch.empty_like(x, memory_format=layout)


def _norm_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, _, _, groups, _ = sizes
    scale = bias if weight is None else weight
    dtype = x.dtype if scale is None or scale.dtype == x.dtype else torch.float32
    mean, rstd = (x.new_empty((B, groups), dtype=dtype) for _ in range(2))
    return _empty_after_group_norm(x), mean, rstd


def _differentiate_group_norm(
    _gradient: Tensor, x: Tensor, _mean: Tensor, _rstd: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor | None, ...]:
    of_x, *of_weight_and_bias = others[-1]
    return (
        _empty_after_group_norm(x) if of_x else None,
        *(torch.empty_like(weight) if asked else None for asked in of_weight_and_bias),
    )


def _make_window(make: Any, *args: Any, **options: Any) -> Tensor:
    """Make a window; a periodic one lacks the last element of its storage."""
    window: Tensor = make(*args, **options)
    length, is_periodic = len(window), len(args) == 1 or args[1]
    return window.new_empty((length + (length > 1 and is_periodic),))[:length]


_WINDOWS = {
    overload: partial(_make_window, overload)
    for packet in (
        *(aten.bartlett_window, aten.blackman_window, aten.hamming_window),
        *(aten.hann_window, aten.kaiser_window),
    )
    for name in packet.overloads()  # type: ignore[no-untyped-call]
    if "out" not in name
    for overload in (getattr(packet, name),)
}

_INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.unique_dim.default: _unique_worst_case,
    aten.add.out: _add_into,
    aten._grouped_mm.default: _multiply_groups,  # noqa: SLF001
    aten.native_group_norm.default: _norm_groups,
    aten.native_group_norm_backward.default: _differentiate_group_norm,
    **_WINDOWS,
    aten.mkldnn_rnn_layer.default: run_layer,
    aten.mkldnn_rnn_layer_backward.default: run_layer_backward,
    aten._foreach_sqrt.default: lambda xs: [*map(aten.empty_like.default, xs)],  # noqa: SLF001
}
"""What to run instead of operators whose result's shape depends on elements, that return something
else for fake tensors than for others, or lay it out otherwise, or that PyTorch decomposes for fake
tensors, which takes most of a trace's time."""

_DEPENDS_ON_MORE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
"""Operators whose results depend on elements, or that change the shape of what they are given."""

_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_default_device = torch._C._get_default_device  # noqa: SLF001 (no public name)
_WithoutModes = torch._C._DisableTorchDispatch  # noqa: SLF001


_Recipe = Callable[[FakeTensorMode, list[FakeTensor]], Any]
"""Makes a result again, from the tensors among the arguments."""

_recipes: dict[tuple[Any, ...], _Recipe | None] = {}
"""What a call returns, by the operator and all that its result depends on; None where that is not
remembered. It holds for all modes of this process."""


class FakeOperators:
    """Runs operators on the fake tensors of a mode.

    Example:
        >>> with FakeTensorMode() as mode:
        ...     x = torch.empty(3, 5)
        ...     FakeOperators(mode)(torch.ops.aten.t.default, (x,), {}).shape
        torch.Size([5, 3])
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator returns."""
        if func in _INSTEAD:
            return _INSTEAD[func](*args, **kwargs)
        described = [func, torch.get_default_dtype(), _default_device(), *kwargs]
        tensors: list[FakeTensor] = []
        if not self._describe((*args, *kwargs.values()), described, tensors):
            return func(*args, **kwargs)
        key = tuple(described)
        recipe = _recipes.get(key)
        if recipe is not None:
            return recipe(self._mode, tensors)
        out = func(*args, **kwargs)
        if key not in _recipes:
            again: list[Any] = described[: 3 + len(kwargs)]
            is_same = self._describe((*args, *kwargs.values()), again, []) and again == described
            _recipes[key] = _learn(func, out, tensors) if is_same else None
        return out

    def _describe(
        self, values: Iterable[Any], described: list[Any], tensors: list[FakeTensor]
    ) -> bool:
        """Describe arguments, and list the tensors; return False for those that cannot be."""
        for value in values:
            if isinstance(value, FakeTensor):
                if value.fake_mode is not self._mode or not _is_ordinary(value):
                    return False
                described += (
                    *(value.dtype, value.fake_device, value.shape),
                    *(value.stride(), value.storage_offset()),
                )
                tensors.append(value)
            elif isinstance(value, _PLAIN):
                described += (value.__class__, value)  # True is not 1
            elif isinstance(value, list | tuple):
                described.append(len(value))
                if not self._describe(value, described, tensors):
                    return False
            elif isinstance(value, torch.Generator):
                described.append(torch.Generator)
            else:
                return False
        return True


def _is_ordinary(tensor: FakeTensor) -> bool:
    """Return whether shape, strides, dtype and device say all that results depend on."""
    return (
        tensor.constant is None
        and tensor.layout is torch.strided
        and not (tensor.dtype.is_complex or tensor.is_neg())
    )


def _learn(func: Any, out: Any, tensors: list[FakeTensor]) -> _Recipe | None:
    """Return how to make a result again; None if it cannot be told from the arguments."""
    is_known = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"  # noqa: SLF001
    if not is_known or _DEPENDS_ON_MORE.intersection(func.tags):
        return None
    if isinstance(out, _PLAIN):
        return lambda *_: out
    if isinstance(out, list | tuple):
        kind, each = type(out), [_learn(func, item, tensors) for item in out]
        recipes = [part for part in each if part is not None]
        if len(recipes) < len(each):
            return None
        return lambda mode, tensors: kind(make(mode, tensors) for make in recipes)
    is_tensor = isinstance(out, FakeTensor) and _is_ordinary(out) and not out.requires_grad
    return _learn_tensor(out, tensors) if is_tensor else None


def _learn_tensor(out: FakeTensor, tensors: list[FakeTensor]) -> _Recipe | None:
    storage = out.untyped_storage()
    numbers = [number for number, tensor in enumerate(tensors) if tensor is out]
    sharing = [
        number
        for number, tensor in enumerate(tensors)
        if tensor.untyped_storage()._cdata == storage._cdata  # noqa: SLF001 (no public name)
    ]
    if len(numbers or sharing) > 1:  # later they may be different tensors
        return None
    if numbers:
        return lambda _, tensors: tensors[numbers[0]]
    shape, stride = tuple(out.shape), out.stride()
    with _WithoutModes():
        least = torch.empty_strided(shape, stride, dtype=out.dtype, device="meta")
    if not sharing and storage.nbytes() != least.untyped_storage().nbytes():
        return None
    dtype, device, offset = out.dtype, out.fake_device, int(out.storage_offset())

    def make(mode: FakeTensorMode, tensors: list[FakeTensor]) -> FakeTensor:
        with _WithoutModes():
            if sharing:
                made = torch.empty(0, dtype=dtype, device="meta")
                made.set_(tensors[sharing[0]].untyped_storage(), offset, shape, stride)
            else:
                made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, made, device)

    return make
