"""Verifies at every backward that every trained parameter is clipped.

A model may change after its clipping was made: a layer is thawed, added, replaced, tied, wrapped or
re-parametrized. A parameter that the clipping does not know would be trained unclipped, so it is
refused.
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
    own = layer._parameters.items()  # noqa: SLF001 (named_parameters lists no parameter twice)
    return {name: p for name, p in own if p is not None and p.requires_grad}


def refuse_wrapper(module: nn.Module) -> None:
    """Refuse modules and parameters that distribute or copy a model.

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
    """Refuse to run a layer inside of a wrapper that was added after the clipping.

    Raises:
        UnsupportedError: ``DistributedDataParallel`` runs the model.
    """
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UnsupportedError(
            "DistributedDataParallel does not work with clipping yet: it averages what autograd "
            "computes, and clipped sums are computed otherwise"
        )


class Coverage:
    """The layers that are clipped, and their parameters when the clipping was made.

    Args:
        layers: Each patched layer, with its trained parameters by name.
    """

    def __init__(self, layers: Mapping[nn.Module, Mapping[str, nn.Parameter]]) -> None:
        self._layers = layers
        self._parameters = {p for own in layers.values() for p in own.values()}
        self.names: dict[nn.Parameter, str] = {}
        """Of every trained parameter that the model has had."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._parameters

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    def verify(self, model: nn.Module) -> set[nn.Parameter]:
        """Verify that every trained parameter is clipped.

        Returns:
            Parameters that belong to more than one layer.

        Raises:
            RuntimeError: A trained parameter was not trained when the clipping was made, or
                belonged to another layer.
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
