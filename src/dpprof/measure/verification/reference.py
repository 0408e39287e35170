"""The clipped gradient by definition, from ``torch.func`` and without code of the methods.

Shape legend: B batch, T tokens, P elements of a parameter, G groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

REFERENCE_NAME = "torch.func"


class PlacedGroup(NamedTuple):
    """Parameters that are clipped together, by position, and the bound of their norm."""

    positions: Sequence[int]
    bound: float
    epsilon: float = 1e-6


def sample_gradients(model: nn.Module, inputs: Sequence[Tensor], labels_BT: Tensor) -> list[Tensor]:
    """Return every sample's gradient of its mean cross-entropy over labelled tokens.

    ``inputs`` are what the model gets, samples first. A model that computes losses, (B,), needs no
    cross-entropy.

    Returns:
        One (B, P) for each trainable parameter, in the order of ``model.parameters()``.
    """
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], labels_T: Tensor, *sample: Tensor) -> Tensor:
        logits_1TV = functional_call(model, parameters, tuple(tensor[None] for tensor in sample))
        return _loss(logits_1TV[0], labels_T)

    gradient = grad(loss)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the only kernel that supports vmap
            dims = (None, 0, *(0 for _ in inputs))
            samples = vmap(gradient, in_dims=dims)(trainable, labels_BT, *inputs)
    except RuntimeError:  # torch.func cannot run the model
        return _one_by_one(model, inputs, labels_BT)
    return [samples[name].flatten(1) for name in trainable]


def _loss(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return functional.cross_entropy(logits_TV, labels_T) if logits_TV.dim() else logits_TV


def _one_by_one(model: nn.Module, inputs: Sequence[Tensor], labels_BT: Tensor) -> list[Tensor]:
    """Return every sample's gradient by autograd, one sample after the other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    samples = []
    for labels_T, *sample in zip(labels_BT, *inputs, strict=True):
        loss = _loss(model(*(tensor[None] for tensor in sample))[0], labels_T)
        # A model may not use all of its parameters.
        samples.append(torch.autograd.grad(loss, parameters, materialize_grads=True))
    return [torch.stack(each).flatten(1) for each in zip(*samples, strict=True)]


def group_norms(samples: Sequence[Tensor], groups: Sequence[PlacedGroup]) -> Tensor:
    """Return the norms of the samples' gradients over each group; (B, G)."""
    return torch.stack([_norms_over(samples, group) for group in groups], dim=1)


def _norms_over(samples: Sequence[Tensor], group: PlacedGroup) -> Tensor:
    norms_B: Tensor = torch.cat([samples[position] for position in group.positions], 1).norm(dim=1)
    return norms_B


def clip_and_average(samples: Sequence[Tensor], groups: Sequence[PlacedGroup]) -> Tensor:
    """Scale every sample's gradient to its bounds, sum, and divide by B.

    The factor is ``min(1, C / (norm + epsilon))``. Without groups nothing is clipped.

    Returns:
        The concatenated gradients of all parameters; (sum of P,).
    """
    scaled = list(samples)
    for group in groups:
        factors_B = (group.bound / (_norms_over(samples, group) + group.epsilon)).clamp(max=1.0)
        for position in group.positions:
            scaled[position] = factors_B[:, None] * samples[position]
    return torch.cat([sample_BP.mean(dim=0) for sample_BP in scaled])
