"""Causal self-attention in several variants.

Shape legend: B batch, T tokens, D d_model, H heads, K head width (D / H).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the attention output of queries, keys and values; all are (B, H, T, K)."""


def causal_mask(T: int, device: torch.device) -> Tensor:
    """Return the mask that is true for later tokens, which a token must not see; (T, T) bool."""
    return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)


def mix_sdpa(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Compute attention by PyTorch's operator, which uses a fused kernel if it has one."""
    y_BHTK: Tensor = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
    return y_BHTK


def mix_eager(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Compute attention step by step; scores and probabilities, B H T^2 each, are saved."""
    T, K = q_BHTK.shape[-2:]
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) * K**-0.5
    scores_BHTT = scores_BHTT.masked_fill(causal_mask(T, q_BHTK.device), float("-inf"))
    y_BHTK: Tensor = scores_BHTT.softmax(dim=-1) @ v_BHTK
    return y_BHTK


MIXES: Mapping[str, Mix] = {"sdpa": mix_sdpa, "eager": mix_eager}


class Attention(nn.Module):
    """Multi-head attention with one projection for queries, keys and values."""

    def __init__(self, d_model: int, heads: int, mix: Mix) -> None:
        super().__init__()
        self.heads = heads
        self.mix = mix
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply attention; (B, T, D) to (B, T, D)."""
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(x_BTD).split(D, dim=2)
        )
        y_BHTK = self.mix(q_BHTK, k_BHTK, v_BHTK)
        mixed_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        return mixed_BTD
