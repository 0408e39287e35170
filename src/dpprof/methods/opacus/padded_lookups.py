"""Opacus's rules of lookup tables, made to leave the row of ``padding_idx`` without a gradient.

PyTorch gives that row no gradient. Opacus 1.6.0's rules give it one, which counts in the samples'
norms, and trains the row where the sum is made of per-sample gradients. So the rules get zeros as
the gradients of padding. A test fails once Opacus is fixed.
"""

from collections.abc import Callable
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn

SAMPLER_TABLES = ("GRAD_SAMPLERS", "NORM_SAMPLERS")
"""Opacus's tables of samplers by type of layer; only ghost clipping has the second."""

Sampler = Callable[[nn.Embedding, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


def has_trained_padding(model: nn.Module) -> bool:
    """Tell whether a model trains a lookup table that has a row for padding."""
    tables = (layer for layer in model.modules() if isinstance(layer, nn.Embedding))
    return any(one.padding_idx is not None and one.weight.requires_grad for one in tables)


def leave_padding_out(module: AbstractGradSampleModule) -> None:
    """Replace the samplers of lookup tables, for this model alone."""
    for table in SAMPLER_TABLES:
        samplers: dict[type[nn.Module], Any] = getattr(module, table, {})
        if nn.Embedding in samplers:
            setattr(module, table, samplers | {nn.Embedding: _wrap(samplers[nn.Embedding])})


def _wrap(sampler: Sampler) -> Sampler:
    def sample(
        layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        if layer.padding_idx is not None:
            is_padding = activations[0] == layer.padding_idx
            backprops = backprops.masked_fill(is_padding[..., None], 0)
        return sampler(layer, activations, backprops)

    return sample
