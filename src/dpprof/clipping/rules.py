"""Which rule runs a layer, and which layers are refused."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from dpprof.clipping.layers import (
    Forward,
    Use,
    run_conv1d,
    run_embedding,
    run_layer_norm,
    run_linear,
    run_rms_norm,
)
from dpprof.clipping.layers_without_rule import run_other
from dpprof.clipping.patching import is_in_place
from dpprof.spec.registry import UnsupportedError

RULES: Mapping[str, Callable[[Any, Use], Forward]] = {
    "torch.nn.modules.linear.Linear": run_linear,
    "torch.nn.modules.sparse.Embedding": run_embedding,
    "torch.nn.modules.normalization.LayerNorm": run_layer_norm,
    "torch.nn.modules.normalization.RMSNorm": run_rms_norm,
    "transformers.pytorch_utils.Conv1D": run_conv1d,
}
"""By the name of the class whose ``forward`` they stand for."""


def refuse_mixing(layer: nn.Module) -> None:
    """Refuse what makes one sample's gradient depend on others, with parameters or without.

    Raises:
        UnsupportedError: The layer is a batch normalisation, or keeps statistics of its inputs,
            which no noise covers.
    """
    name = type(layer).__name__
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 (the common base)
        raise UnsupportedError(f"{name} mixes samples; use GroupNorm or LayerNorm")
    if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:  # noqa: SLF001
        raise UnsupportedError(
            f"{name} keeps statistics of its inputs without noise; set track_running_stats=False"
        )


def find_rule(layer: nn.Module) -> Callable[[Any, Use], Forward]:
    """Find how a layer is run: by its own rule, or if it has none by ``torch.func``.

    A subclass has the rule of the class whose ``forward`` it inherits.

    Raises:
        UnsupportedError: The layer has parameters beside layers in it, parameters that are made
            of others, or is run by something else, such as another ``Clipping``.
    """
    name = type(layer).__name__
    if "forward" in vars(layer) or is_in_place(layer):
        raise UnsupportedError(f"{name} is run by something else already; remove() that first")
    if isinstance(layer, ParametrizationList):
        raise UnsupportedError(
            "a parametrized weight is computed once for all samples, so it has no gradient of "
            "each; remove the parametrization, or freeze what it is made of"
        )
    for base in type(layer).__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None and vars(base).get("forward") == type(layer).forward:
            unknown = {name for name, _ in layer.named_parameters(recurse=False)} - KNOWN
            if unknown:
                raise UnsupportedError(
                    f"{name} has a parameter {min(unknown)} that its rule does not know; a "
                    "re-parametrized weight (weight_norm, say) has no gradient of each sample"
                )
            return rule
    if any(True for child in layer.children() for _ in child.parameters()):
        raise UnsupportedError(
            f"{name} has parameters of its own beside the layers in it; put them "
            "into a layer without others, or freeze them"
        )
    return run_other


KNOWN = {"weight", "bias"}
"""The parameters of every layer that has a rule."""
