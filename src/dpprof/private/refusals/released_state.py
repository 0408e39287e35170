"""Refuses steps that leave something of the samples in a tensor that a module holds.

Only the optimizer's step adds noise. A running mean, a codebook, an expert's bias or a cache that
forward writes leaves the run in ``state_dict()``, or is read by a later forward, where a sample of
an earlier batch moves the gradients of all others by more than C. So every tensor that a module
holds stays as it was when the clipping was made: parameters that are not trained, buffers,
persistent or not, attributes, also of classes, and what lists, tuples, dictionaries, sets, deques,
dataclasses, simple namespaces and transformers' caches among these hold, also of modules that are
held so. ``forwards`` verifies trained parameters.

It proves that such a tensor is the same object in the same version, and that a buffer or an
attribute has the same bytes, for ``.data`` leaves versions as they are. It does not see numbers,
arrays of NumPy and objects of other classes, what is outside of modules, and writes of frozen
parameters through ``.data`` between steps, as when adapters are merged.
"""

import dataclasses
import operator
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.allocation_marks import allocates, allocates_for_its_caller
from dpprof.private.errors import UnsupportedError
from dpprof.private.refusals.tensor_kinds import find_no_bytes

_Place = tuple[nn.Module, str]
_Held = tuple[_Place, Tensor]

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, modules, hooks

_BASES = set(nn.Module.__mro__)

_OF_RECURRENT = {"_flat_weights"}  # parameters again, or those of before a conversion

_EXTRA = "_extra_state"

_PLAIN = {bool, int, float, str, type(None)}

_SMALL = 4096  # tensors with fewer elements are compared together


class ReleasedState:
    """The tensors that modules hold, but for the parameters that are trained with noise.

    ``own`` returns the parameter that stays, of one that a layer has at present; ``public``
    names buffers, attributes and parameters that hold nothing of the samples, and are there
    (``ValueError``). ``UnsupportedError``: a module puts other things than tensors into
    ``state_dict()``, or holds tensors whose numbers cannot be compared, or that are trained and
    are no parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        own: Callable[[nn.Parameter], nn.Parameter],
        is_clipped: Callable[[nn.Parameter], bool],
        public: Collection[str],
    ) -> None:
        self._model, self._own, self._is_clipped = model, own, is_clipped
        names = {
            (module, name): _write(path, name)
            for path, module in self._walk()
            for name in (_EXTRA, *dir(module), *module._parameters)  # noqa: SLF001
        }
        unknown = set(public).difference(names.values())
        if unknown:
            raise ValueError(
                f"public_buffers: the model has no buffer {min(unknown)!r}, nor an attribute or "
                "parameter of that name; if forward makes it, run the model once before its "
                "clipping is made"
            )
        self._sources: list[Iterable[Any]] = []
        self._contents: list[Any] = []
        self._public = {place for place, name in names.items() if name in public}
        for path, module in model.named_modules():
            is_plain = type(module).get_extra_state is nn.Module.get_extra_state
            if not is_plain and (module, _EXTRA) not in self._public:
                raise UnsupportedError(
                    f"state_dict() holds {_write(path, _EXTRA)}, which may carry samples; if it "
                    "holds none, name it in public_buffers"
                )
        self._held = self._look()
        self._versions = self._read_versions()
        for place, tensor in self._held:
            self._refuse_kind(place, tensor)
        compared = [each for each in self._held if not isinstance(each[1], nn.Parameter)]
        self._values = [(group, _copy(group)) for group in _group(compared)]

    def verify(self) -> None:
        """Refuse a step if what is not public changed, came or went; may wait for the device."""
        present = [*chain.from_iterable(self._sources)]
        pairs = zip(present, self._contents, strict=False)
        if len(present) != len(self._contents):
            self._compare(self._look())
        elif not all(map(operator.is_, present, self._contents)):
            if all(now is old or {type(now), type(old)} <= _PLAIN for now, old in pairs):
                self._contents = present  # such as counts of calls
            else:
                self._compare(self._look())
        versions = self._read_versions()
        if versions != self._versions:
            marks = zip(self._held, self._versions, versions, strict=True)
            changed = next(place for (place, _), old, now in marks if now != old)
            self._refuse(changed, "was changed in place")
        # Instruments count what a step computes, and not how it is verified.
        with _disable_current_modes():
            self._compare_values()

    def _compare_values(self) -> None:
        for group, value in self._values:
            if isinstance(value, FakeTensor) or is_same(_join(group), value):
                continue
            parts = torch.split(value, [tensor.numel() for _, tensor in group])
            place = next(
                place
                for (place, tensor), part in zip(group, parts, strict=True)
                if not is_same(tensor.reshape(-1), part)
            )
            self._refuse(place, "was changed through .data")

    def _compare(self, present: Sequence[_Held]) -> None:
        """Refuse tensors that came, went or were replaced."""
        before, now = map(_by_place, (self._held, present))
        for place in before.keys() ^ now.keys():
            self._refuse(place, "came" if place in now else "went")
        for place, tensors in before.items():
            if len(tensors) != len(now[place]) or any(map(operator.is_not, tensors, now[place])):
                self._refuse(place, "was replaced")

    def _refuse_kind(self, place: _Place, tensor: Tensor) -> None:
        """Refuse a buffer or an attribute that cannot be compared, or that somebody trains."""
        what = None if isinstance(tensor, nn.Parameter) else find_no_bytes(tensor)
        if what is not None:
            raise UnsupportedError(
                f"{self._name(place)} must not change, and is {what}, or name it in public_buffers "
                "if it holds nothing of the samples"
            )
        if tensor.requires_grad and tensor.is_leaf:
            raise UnsupportedError(
                f"{self._name(place)} requires a gradient and is no parameter of the model, so it "
                "would be trained without noise; register it, or call requires_grad_(False)"
            )

    def _refuse(self, place: _Place, how: str) -> None:
        module, name = place
        temporary = module._non_persistent_buffers_set  # noqa: SLF001 (it has no public name)
        is_saved = name in (*module._parameters, *module._buffers) and name not in temporary  # noqa: SLF001
        to, unread = (
            ("state_dict() and to later steps", "")
            if is_saved
            else ("later steps", ", or no later step reads it")
        )
        raise RuntimeError(
            f"{self._name(place)} {how} since this clipping was made, and takes what it holds to "
            f"{to} without noise; compute it anew in each forward and delete it before backward, "
            f"or name it in public_buffers if it holds nothing of the samples{unread} (after you "
            "load or move a model, make a new clipping)"
        )

    def _name(self, place: _Place) -> str:
        module, name = place
        paths = {inner: path for path, inner in self._walk()}
        return _write(paths.get(module, type(module).__name__), name)

    def _read_versions(self) -> list[int]:
        return [-1 if tensor.is_inference() else tensor._version for _, tensor in self._held]  # noqa: SLF001

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        """List all modules with their paths, and those that attributes hold beside them."""
        seen: set[nn.Module] = set()
        waiting = [("", self._model)]
        while waiting:
            path, module = waiting.pop()
            for inside, inner in module.named_modules(seen, path):
                yield inside, inner
                for name, value in vars(inner).items():
                    if name not in _OF_MODULES:
                        others = (other for other in _open(value) if isinstance(other, nn.Module))
                        waiting += [(_write(inside, name), other) for other in others]

    def _look(self) -> list[_Held]:
        """List the tensors that must stay; note all that is held, to see changes cheaply."""
        held: list[_Held] = []
        self._sources = []
        classes: dict[type, nn.Module] = {}
        parameters = set(map(id, self._model.parameters()))
        for _, module in self._walk():
            for kind in type(module).__mro__:
                classes.setdefault(kind, module)
            for name, present in module._parameters.items():  # noqa: SLF001
                if present is None or (present.requires_grad and id(present) in parameters):
                    continue
                parameter = self._own(present)
                if not self._is_clipped(parameter):
                    held.append(((module, name), parameter))
            for of_module in (module._parameters, module._modules):  # noqa: SLF001
                self._sources.append(of_module.values())
            for values in (module._buffers, vars(module)):  # noqa: SLF001
                held += self._look_into(module, values, parameters)
            held += self._look_into_tensors(module, parameters)
        for kind, module in classes.items():
            if kind not in _BASES:
                held += self._look_into(module, vars(kind), parameters)
        self._contents = [*chain.from_iterable(self._sources)]
        return [(place, tensor) for place, tensor in held if place not in self._public]

    def _look_into_tensors(self, module: nn.Module, parameters: Collection[int]) -> Iterator[_Held]:
        """List the tensors that attributes of a module's own tensors hold."""
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):  # noqa: SLF001
            if type(tensor) in (nn.Parameter, nn.Buffer, Tensor):
                for (_, inner), item in self._look_into(module, vars(tensor), parameters):
                    yield (module, f"{name}.{inner}"), item

    def _look_into(
        self, module: nn.Module, held: Mapping[str, Any], parameters: Collection[int]
    ) -> Iterator[_Held]:
        """List the tensors among values and in their containers, but for the model's parameters."""
        without = _OF_MODULES | (_OF_RECURRENT if isinstance(module, nn.RNNBase) else set())
        self._sources.append(held.values())
        for name, value in held.items():
            for item in _open(value) if name not in without else ():
                if isinstance(item, Tensor) and id(item) not in parameters:
                    yield (module, name), item
                elif (inside := _inside(item)) is not None:
                    self._sources.append(inside)


def _open(value: Any) -> Iterator[Any]:
    """List a value and, of a container, what is in it at any depth."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        inside = _inside(item)
        if inside is not None:
            if id(item) in seen:
                continue
            seen.add(id(item))
            waiting += inside
        yield item


def _inside(item: Any) -> Collection[Any] | None:
    kind = type(item)
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, _CONTAINERS):
        return item
    is_record = dataclasses.is_dataclass(kind) or kind is types.SimpleNamespace
    if kind.__module__.startswith("bitsandbytes."):  # frozen weights, which forward rearranges
        return None
    if is_record or kind.__module__ == "transformers.cache_utils":
        return vars(item).values() if hasattr(item, "__dict__") else ()
    return None


def _by_place(held: Iterable[_Held]) -> dict[_Place, list[Tensor]]:
    tensors: dict[_Place, list[Tensor]] = defaultdict(list)
    for place, tensor in held:
        tensors[place].append(tensor)
    return tensors


def _group(held: Iterable[_Held]) -> list[list[_Held]]:
    """Group tensors that are compared at once: large ones by themselves."""
    groups: dict[Any, list[_Held]] = defaultdict(list)
    for place, tensor in held:
        key = (tensor.device, tensor.dtype) if tensor.numel() < _SMALL else id(tensor)
        groups[key].append((place, tensor))
    return list(groups.values())


@allocates_for_its_caller
@torch.no_grad()
def _join(group: Sequence[_Held]) -> Tensor:
    """Return the numbers of a group as a vector; those of one tensor as they lie."""
    flat = [tensor.reshape(-1) for _, tensor in group]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


@allocates("workspace")
def _copy(group: Sequence[_Held]) -> Tensor:
    joined = _join(group)
    return joined if len(group) > 1 else joined.clone()


def _write(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Tell whether tensors have the same bytes, if they have any. This waits for the device."""
    if isinstance(tensor, FakeTensor) or find_no_bytes(tensor) is not None:
        return True
    plain = (x.detach().resolve_conj().resolve_neg().contiguous() for x in (tensor, other))
    return torch.equal(*(x.view(-1).view(torch.uint8) for x in plain))
