"""Verifies at every backward that every trained parameter is clipped.

A model may change after its clipping was made: a layer is thawed, added, replaced, tied, wrapped or
re-parametrized. A parameter that the clipping does not know would be trained unclipped, so it is
refused.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from dpprof.private.errors import UnsupportedError
from dpprof.private.ranks.ranks import Ranks
from dpprof.private.refusals.tensor_kinds import NUMBERS, refuse_parameter

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "it is not the whole model",
    "torch.nn.parallel.data_parallel.DataParallel": "it copies layers without their clipping",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "it replaces parameters"
    ),
    "opacus.grad_sample.gsm_base.AbstractGradSampleModule": (
        "it computes gradients of its own; give a model that Opacus did not wrap"
    ),
}


def trained_in(layer: nn.Module) -> dict[str, nn.Parameter]:
    """List a layer's own parameters that require a gradient."""
    own = layer._parameters.items()  # noqa: SLF001 (named_parameters lists no parameter twice)
    return {name: p for name, p in own if p is not None and p.requires_grad}


def class_names(module: nn.Module) -> list[str]:
    """List the full names of a module's class and of its bases."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def refuse_wrapper(module: nn.Module) -> None:
    """Refuse modules that distribute or copy a model (``UnsupportedError``)."""
    for name in class_names(module):
        if name in _WRAPPERS:
            kind = type(module).__name__
            raise UnsupportedError(f"{kind} does not work with clipping yet: {_WRAPPERS[name]}")


class Coverage:
    """The layers that are clipped, and their parameters, by name, when the clipping was made."""

    def __init__(
        self, layers: Mapping[nn.Module, Mapping[str, nn.Parameter]], ranks: Ranks
    ) -> None:
        self._layers, self._ranks = layers, ranks
        self._parameters = {p for own in layers.values() for p in own.values()}
        self.names: dict[nn.Parameter, str] = {}  # of all that the model has had
        self._modules: list[nn.Module] = []
        self._held: list[Any] = []  # modules and parameters, as verified last
        self._flags: list[Any] = []
        self._shared: set[nn.Parameter] = set()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._parameters

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    def verify(self, model: nn.Module) -> set[nn.Parameter]:
        """Verify that every trained parameter is clipped; return those of more than one layer.

        ``RuntimeError``: one was not trained when the clipping was made, or belonged to another
        layer; ``UnsupportedError``: one became a tensor that clipping is not exact for.
        """
        held, flags = self._look()
        is_same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if not (self._modules and is_same and flags == self._flags):
            self._shared = self._verify_all(model)
            self._modules = list(model.modules())
            self._held, self._flags = self._look()
        return self._shared

    def _look(self) -> tuple[list[Any], list[Any]]:
        """List what modules hold, and then their classes, names and what parameters are set to."""
        own = [module._parameters for module in self._modules]  # noqa: SLF001
        parameters = [*chain.from_iterable(by_name.values() for by_name in own)]
        modules = chain.from_iterable(module._modules.values() for module in self._modules)  # noqa: SLF001
        settings = [(p.requires_grad, p.dtype) for p in parameters if p is not None]
        flags = [*map(type, self._modules), *chain.from_iterable(own), *settings]
        return [*parameters, *modules], flags

    def _verify_all(self, model: nn.Module) -> set[nn.Parameter]:
        owners: Counter[nn.Parameter] = Counter()
        for path, layer in model.named_modules(remove_duplicate=True):
            trained = trained_in(layer)
            if not trained:
                continue
            refuse_wrapper(layer)
            before = self._layers.get(layer)
            for name, present in trained.items():
                parameter = self._ranks.own(present)
                full = f"{path}.{name}" if path else name
                if present.dtype not in NUMBERS:  # .data may have become another tensor's
                    refuse_parameter(full, present)
                self.names.setdefault(parameter, full)
                if before is None or before.get(name) is not parameter:
                    what = "moved or tied" if parameter in self else "thawed, added or replaced"
                    raise RuntimeError(
                        f"{full} is trained and not clipped: it was {what} after this clipping was "
                        "made; call remove() and make a new one"
                    )
                owners[parameter] += 1
        return {parameter for parameter, count in owners.items() if count > 1}
