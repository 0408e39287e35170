"""Layers that run by a rule for as long as a ``Clipping`` is there; every copy of one is plain.

A layer is given a class of its own, derived from the one that it had, whose ``forward`` asks the
layer for its rule. Names, isinstance and ``state_dict`` stay what they were. Whatever copies a
layer (``copy.deepcopy``, ``AveragedModel``, pickle, ``torch.save``) makes one of the class that it
had before: a copy has parameters of its own, which no clipping knows.
"""

import copyreg
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_RULE = "_clipping_rule"


class _Rule:
    """How a layer runs; it belongs to that layer and is lost in every copy."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self.layer = layer
        self.forward = forward
        self.rests = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class InPlace:
    """Comes before a layer's own class, and lets its rule run it."""

    plain: type[nn.Module]
    """The class that the layer had."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run by the rule, or as the layer always did."""
        rule = vars(self).get(_RULE)
        if rule is None or rule.rests or rule.layer is not self:
            return self.plain.forward(self, *inputs, **named)
        return rule.forward(*inputs, **named)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        own = type(self)
        arguments = tuple(self.plain if given is own else given for given in arguments)
        if make is getattr(copyreg, "__newobj__"):  # noqa: B009 (its stub leaves it out)
            make = object.__new__  # pickle lets the other one make the object's own class alone
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _RULE}
        return make, arguments, *rest


@functools.cache
def _class_for(plain: Any) -> Any:
    known = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (InPlace, plain), {**known, "plain": plain})


def put_in_place(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Have a layer run by a rule."""
    plain: Any = type(layer)
    layer.__class__ = _class_for(plain)
    vars(layer)[_RULE] = _Rule(layer, forward)


def is_in_place(layer: nn.Module) -> bool:
    """Tell whether a layer is run by a rule."""
    return vars(layer).get(_RULE) is not None


def put_back(layer: nn.Module) -> None:
    """Give a layer back as it was."""
    vars(layer).pop(_RULE, None)
    # Whatever was derived from this class since then runs as the plain one without a rule.
    if isinstance(layer, InPlace) and InPlace in type(layer).__bases__:
        layer.__class__ = layer.plain  # type: ignore[assignment]


@contextmanager
def resting(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Run layers as they always did within."""
    rules = [vars(layer)[_RULE] for layer in layers]
    for rule in rules:
        rule.rests = True
    try:
        yield
    finally:
        for rule in rules:
            rule.rests = False
