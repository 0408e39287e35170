"""Records the state of a layer as it runs, so that backward differentiates the forward that ran.

A rule's backward reads the layer's weights, and a layer without a rule runs again. If either
changed since forward, the gradient would be that of a forward that never ran. Autograd refuses a
changed tensor that it saved; checkpointing hides even that.
"""

from collections.abc import Callable

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpprof.private.contributions.contributions import storage_of
from dpprof.private.refusals.forwards import Forward
from dpprof.private.refusals.tensor_kinds import is_sparse

_PLAIN = (bool, int, float, str, type(None))


class LayerCall:
    """One call of a layer: its settings and the versions of its parameters, and of layers inside.

    Settings are ``training`` and other plain attributes. An attribute that forward itself changes,
    such as a counter, does not count.

    Args:
        layer: It is about to run.
        forward: The forward of the model to which the call belongs; None for layers inside.
    """

    __slots__ = ("_inside", "_layer", "_settings", "_versions", "forward")

    def __init__(self, layer: nn.Module, forward: Forward | None = None) -> None:
        self._layer, self.forward = layer, forward
        self._settings = read_settings(layer)
        # named_parameters lists no parameter twice
        own = [p for p in layer._parameters.values() if p is not None]  # noqa: SLF001
        # By storage too: layer.to(dtype) gives a parameter other data, in the same version.
        self._versions = [(p, p._version, _storage_of(p)) for p in own]  # noqa: SLF001
        self._inside = [LayerCall(child) for child in layer.children()]

    def end(self) -> None:
        """Forget the settings that the call changed."""
        after = read_settings(self._layer)
        if after != self._settings:
            self._settings = {k: v for k, v in self._settings.items() if after.get(k) == v}
        for call in self._inside:
            call.end()

    def verify(self, name_of: Callable[[nn.Module], str]) -> None:
        """Refuse a backward after a change.

        Args:
            name_of: Names a layer, for the message.

        Raises:
            RuntimeError: A setting or a parameter changed since the call.
        """
        present = vars(self._layer)
        for name, value in self._settings.items():
            if name not in present or present[name] != value:
                is_set = type(value) is bool  # numbers and words may be those of samples
                which = f"was {value}, and is {present.get(name)}" if is_set else "is another one"
                self._refuse(name_of, f"{name} {which}")
        for parameter, version, storage in self._versions:
            if parameter._version != version or _storage_of(parameter) != storage:  # noqa: SLF001
                own = self._layer._parameters.items()  # noqa: SLF001
                name = next((name for name, other in own if other is parameter), "a parameter")
                self._refuse(name_of, f"{name} was changed in place")
        for call in self._inside:
            call.verify(name_of)

    def _refuse(self, name_of: Callable[[nn.Module], str], what: str) -> None:
        raise RuntimeError(
            f"{name_of(self._layer)} changed between forward and backward ({what}), so the "
            "gradient would not be that of the forward that ran; run forward again"
        )


def read_settings(layer: nn.Module) -> dict[str, object]:
    """Return the plain attributes of a layer."""
    return {name: value for name, value in vars(layer).items() if type(value) in _PLAIN}


def _storage_of(parameter: nn.Parameter) -> StorageWeakRef | None:
    # A sparse one has several; a frozen one may be sparse. data_ptr changes under FSDP.
    return None if is_sparse(parameter) else storage_of(parameter)
