"""Records the state of a layer as it runs, so that backward differentiates the forward that ran.

A rule's backward reads the layer's weights, and a layer without a rule runs again. If either
changed since forward, the gradient would be that of a forward that never ran. Autograd refuses a
changed tensor that it saved; checkpointing hides even that.
"""

import operator
from collections.abc import Callable, Mapping

import torch
from torch import nn

from dpprof.private.refusals.forwards import Forward
from dpprof.private.refusals.tensor_kinds import is_sparse

_PLAIN = (bool, int, float, str, type(None))

_is_leaf = operator.attrgetter("is_leaf")  # faster than a loop, and each call of a layer asks


class LayerCall:
    """One call of a layer: its settings and the versions of its parameters, and of layers inside.

    Settings are ``training`` and other plain attributes. An attribute that forward itself changes,
    such as a counter, does not count. ``forward`` is that of the model; None for layers inside.
    ``RuntimeError``: a parameter in use was computed from others, to which its gradient would go.
    """

    __slots__ = ("_attributes", "_inside", "_layer", "_versions", "forward")

    def __init__(self, layer: nn.Module, forward: Forward | None = None) -> None:
        self._layer, self.forward = layer, forward
        self._attributes: Mapping[str, object] = vars(layer).copy()
        # named_parameters lists no parameter twice
        own = [p for p in layer._parameters.values() if p is not None]  # noqa: SLF001
        if not all(map(_is_leaf, own)) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(layer).__name__} runs with tensors that were computed in place of its "
                "parameters, as torch.func.functional_call gives them; what they were computed "
                "from is not clipped: call the model with its own, or detach() them"
            )
        # By storage too: layer.to(dtype) gives a parameter other data, in the same version.
        self._versions = [(p, p._version, _storage_of(p)) for p in own]  # noqa: SLF001
        self._inside = [LayerCall(child) for child in layer.children()]

    def end(self) -> None:
        """Forget the settings that the call changed."""
        if not self._has_same_attributes():
            after = read_settings(vars(self._layer))
            before = read_settings(self._attributes)
            self._attributes = {k: v for k, v in before.items() if after.get(k) == v}
        for call in self._inside:
            call.end()

    def verify(self, name_of: Callable[[nn.Module], str]) -> None:
        """Refuse a backward after a setting or a parameter changed (``RuntimeError``)."""
        present = vars(self._layer)
        settings = {} if self._has_same_attributes() else read_settings(self._attributes)
        for name, value in settings.items():
            if name not in present or present[name] != value:
                is_set = type(value) is bool  # numbers and words may be those of samples
                which = f"was {value}, and is {present.get(name)}" if is_set else "is another one"
                self._refuse(name_of, f"{name} {which}")
        for parameter, version, storage in self._versions:
            if parameter._version != version or not _is_same(_storage_of(parameter), storage):  # noqa: SLF001
                own = self._layer._parameters.items()  # noqa: SLF001
                name = next((name for name, other in own if other is parameter), "a parameter")
                self._refuse(name_of, f"{name} was changed in place")
        for call in self._inside:
            call.verify(name_of)

    def _has_same_attributes(self) -> bool:
        """Tell whether all attributes are the same objects still; others may be equal."""
        present, before = vars(self._layer), self._attributes
        is_same = map(operator.is_, present.values(), before.values())
        return list(present) == list(before) and all(is_same)

    def _refuse(self, name_of: Callable[[nn.Module], str], what: str) -> None:
        raise RuntimeError(
            f"{name_of(self._layer)} changed between forward and backward ({what}), so the "
            "gradient would not be that of the forward that ran; run forward again"
        )


def read_settings(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return those attributes that are plain."""
    return {name: value for name, value in attributes.items() if is_setting(value)}


def is_setting(value: object) -> bool:
    """Tell whether a value is plain: a number, a text, a flag or None."""
    return type(value) in _PLAIN


def _storage_of(parameter: nn.Parameter) -> torch.UntypedStorage | None:
    # A sparse one has several; a frozen one may be sparse. data_ptr changes under FSDP.
    return None if is_sparse(parameter) else parameter.untyped_storage()


def _is_same(storage: torch.UntypedStorage | None, other: torch.UntypedStorage | None) -> bool:
    if storage is None or other is None:
        return storage is other
    return bool(storage._cdata == other._cdata)  # noqa: SLF001 (each read makes another object)
