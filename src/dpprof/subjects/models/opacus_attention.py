"""Opacus's ``DPMultiheadAttention`` as self-attention.

It is used with ``batch_first=False``, because with ``batch_first=True`` Opacus 1.6.0 refuses every
mask and mixes heads with positions (meta-pytorch/opacus#774; a test of equal outputs in
tests/models/test_transformer.py fails once this is fixed). But Opacus's hooks look for samples on
the first axis. So each linear layer is wrapped in a layer that swaps the two axes and swaps them
back.

Shape legend: B batch, T tokens, D d_model.
"""

from collections.abc import Callable

import torch
from opacus.layers import DPMultiheadAttention
from torch import Tensor, nn


class _BatchFirst(nn.Module):
    """Applies a layer to (B, T, D), given (T, B, D)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TBD: Tensor) -> Tensor:
        """Apply the layer; (T, B, D) to (T, B, D)."""
        y_BTD: Tensor = self.layer(x_TBD.transpose(0, 1))
        return y_BTD.transpose(0, 1)


class OpacusAttention(nn.Module):
    """Multi-head attention with separate projections for queries, keys and values.

    ``make_mask`` returns what a number of tokens must not see on a device; (T, T) bool.
    """

    def __init__(
        self, d_model: int, heads: int, make_mask: Callable[[int, torch.device], Tensor] | None
    ) -> None:
        super().__init__()
        self.make_mask = make_mask
        self.attention = DPMultiheadAttention(d_model, heads)
        for name, layer in list(self.attention.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(self.attention, name, _BatchFirst(layer))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply attention; (B, T, D) to (B, T, D)."""
        x_TBD = x_BTD.transpose(0, 1)
        mask = self.make_mask and self.make_mask(x_BTD.shape[1], x_BTD.device)
        y_TBD: Tensor
        y_TBD, _ = self.attention(x_TBD, x_TBD, x_TBD, attn_mask=mask, need_weights=False)
        return y_TBD.transpose(0, 1)
