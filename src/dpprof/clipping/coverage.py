"""Whether every parameter that is trained is clipped: asked anew at every backward.

A model may change after its clipping was made: a layer thawed, added, replaced, tied, wrapped or
re-parametrized. What the clipping does not know would be trained unclipped, so it is refused.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpprof.spec.registry import UnsupportedError

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "it averages what autograd computes",
    "torch.nn.parallel.data_parallel.DataParallel": "it copies layers without their clipping",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "it replaces parameters"
    ),
}


def trained_in(layer: nn.Module) -> dict[str, nn.Parameter]:
    """List a layer's own parameters that require a gradient."""
    own = layer._parameters.items()  # noqa: SLF001 (named_parameters tells no parameter twice)
    return {name: p for name, p in own if p is not None and p.requires_grad}


def refuse_wrapper(module: nn.Module) -> None:
    """Refuse a module, and parameters, that train a model in parts or copies.

    Raises:
        UnsupportedError: No clipping works with it yet.
    """
    for base in type(module).__mro__:
        why = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if why is not None:
            raise UnsupportedError(f"{base.__name__} does not work with clipping yet: {why}")
    for parameter in trained_in(module).values():
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "placements"):
            raise UnsupportedError("sharded parameters (DTensor) do not work with clipping yet")


def refuse_data_parallel() -> None:
    """Refuse to run a layer inside of a wrapper that was put around the model later.

    Raises:
        UnsupportedError: ``DistributedDataParallel`` runs the model.
    """
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UnsupportedError(
            "DistributedDataParallel does not work with clipping yet: it averages what autograd "
            "computes, and clipped sums are none of that"
        )


class Coverage:
    """The layers that are clipped, and the parameters that each had.

    Args:
        layers: Each layer that is in place, with its trained parameters by name.
    """

    def __init__(self, layers: Mapping[nn.Module, Mapping[str, nn.Parameter]]) -> None:
        self._layers = layers
        self._parameters = {p for own in layers.values() for p in own.values()}
        self.names: dict[nn.Parameter, str] = {}
        """Of every parameter that was ever seen in the model."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._parameters

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    def look(self, model: nn.Module) -> set[nn.Parameter]:
        """Look whether all that is trained is clipped.

        Returns:
            Parameters that belong to more than one layer.

        Raises:
            RuntimeError: A parameter is trained that was not when the clipping was made, or
                belongs to another layer now.
        """
        owners: Counter[nn.Parameter] = Counter()
        for path, layer in model.named_modules(remove_duplicate=True):
            trained = trained_in(layer)
            if not trained:
                continue
            refuse_wrapper(layer)
            known = self._layers.get(layer)
            for name, parameter in trained.items():
                full = f"{path}.{name}" if path else name
                self.names.setdefault(parameter, full)
                if known is None or (known.get(name) is not parameter):
                    self._refuse(full, parameter)
                owners[parameter] += 1
        return {parameter for parameter, count in owners.items() if count > 1}

    def _refuse(self, name: str, parameter: nn.Parameter) -> None:
        what = "moved or tied" if parameter in self else "thawed, added or replaced"
        raise RuntimeError(
            f"{name} is trained and not clipped: it was {what} after this clipping was made; call "
            "remove() and make a new one"
        )
