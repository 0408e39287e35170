"""Patches layers so that a rule runs their ``forward`` while a ``Clipping`` is attached.

A patched layer's class becomes a subclass of its own class, so names, ``isinstance`` and
``state_dict`` stay the same. A rule may also replace the ``forward`` of a base class alone: then
the layer's own ``forward`` runs, and its call of ``super().forward`` runs the rule. The call of a
module may be watched in the same way, and its ``forward`` keeps its signature. Every copy
(``copy.deepcopy``, ``AveragedModel``, pickle, ``torch.save``) has the original class: its
parameters are new, so no clipping knows them.
"""

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

_PATCH = "_clipping_patch"
_WATCH = "_clipping_watch"


class _Patch:
    """The function that runs a layer; a copy of the layer gets None instead."""

    def __init__(
        self, layer: nn.Module, forward: Callable[..., Any], is_on: Callable[[], bool]
    ) -> None:
        self.layer, self.forward, self.is_on = layer, forward, is_on

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _active(layer: Any, name: str) -> _Patch | None:
    """Return what patches, or watches, a layer now."""
    patch: _Patch | None = vars(layer).get(name)
    return patch if patch is not None and patch.layer is layer and patch.is_on() else None


class _Replacing:
    """Comes before the class whose ``forward`` a patch replaces."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        patch = _active(self, _PATCH)
        if patch is None:
            return super().forward(*inputs, **named)  # type: ignore[misc]
        return patch.forward(*inputs, **named)


class _Watching:
    """Comes before the class of a module whose calls are watched."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Let the watch call the module, or call it where there is none."""
        call = super().__call__  # type: ignore[misc]
        watch = _active(self, _WATCH)
        return call(*inputs, **named) if watch is None else watch.forward(call, *inputs, **named)


class PatchedLayer:
    """First base class of every patched layer's class."""

    original: type[nn.Module]  # the layer's class before it was patched
    replaced: type[nn.Module] | None  # None where only the calls are watched

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        own = type(self)
        arguments = tuple(self.original if argument is own else argument for argument in arguments)
        if make is getattr(copyreg, "__newobj__"):  # noqa: B009 (its stub leaves it out)
            make = object.__new__  # pickle accepts __newobj__ only with the object's own class
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: rest[0][key] for key in rest[0] if key not in (_PATCH, _WATCH)}
        return make, arguments, *rest


@functools.cache
def _derive_class(original: Any, replaced: Any, watches: bool) -> Any:
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own: tuple[Any, ...] = (PatchedLayer, *([_Watching] if watches else []))
    if replaced is None:
        bases = (*own, original)
    elif replaced is original:
        bases = (*own, _Replacing, original)
    else:
        bases = (*own, original, type(replaced.__name__, (_Replacing, replaced), {}))
    return type(original.__name__, bases, {**names, "original": original, "replaced": replaced})


def patch_layer(
    layer: nn.Module,
    forward: Callable[..., Any],
    replaced: type[nn.Module],
    is_on: Callable[[], bool],
) -> None:
    """Let ``forward`` run a layer while ``is_on``, in place of that of its own class or a base."""
    classes: tuple[Any, Any] = (type(layer), replaced)
    layer.__class__ = _derive_class(*classes, False)
    vars(layer)[_PATCH] = _Patch(layer, forward, is_on)


def watch_calls(module: nn.Module, watch: Callable[..., Any], is_on: Callable[[], bool]) -> None:
    """Let ``watch`` call a module, patched or not: it gets the call, and the call's arguments."""
    own: Any = type(module)
    has_patch = PatchedLayer in own.__bases__
    classes: tuple[Any, Any] = (own.original, own.replaced) if has_patch else (own, None)
    module.__class__ = _derive_class(*classes, True)
    vars(module)[_WATCH] = _Patch(module, watch, is_on)


def patch_of(layer: nn.Module) -> object:
    """Return what patches a layer; None where nothing does."""
    return vars(layer).get(_PATCH)


def is_patched(layer: nn.Module) -> bool:
    """Tell whether a layer is patched."""
    return patch_of(layer) is not None


def is_patched_now(layer: nn.Module) -> bool:
    """Tell whether a call of a layer runs what patches it."""
    return _active(layer, _PATCH) is not None


def unpatch_layer(layer: nn.Module) -> None:
    """Restore a layer's original ``forward`` and calls."""
    for name in (_PATCH, _WATCH):
        vars(layer).pop(name, None)
    # A class derived from the patched one since then runs the original forward without a patch.
    if isinstance(layer, PatchedLayer) and PatchedLayer in type(layer).__bases__:
        layer.__class__ = layer.original  # type: ignore[assignment]


def calls_forward_of(own: type[nn.Module], base: type[nn.Module]) -> bool:
    """Tell whether every ``forward`` between a class and its base calls the next by ``super()``.

    If one also uses the parameters otherwise, backward finds that as a use outside of the layer.
    """
    between = own.__mro__[: own.__mro__.index(base)]
    forwards = [
        inspect.unwrap(vars(kind)["forward"]) for kind in between if "forward" in vars(kind)
    ]
    codes = [getattr(forward, "__code__", None) for forward in forwards]
    return all(code and {"super", "forward"} <= set(code.co_names) for code in codes)
