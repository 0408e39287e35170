"""A decoder-only transformer on which every Opacus method works; its blocks serve others too.

Therefore no weight is shared (embedding and head are separate), each sample looks up its positions
with contiguous ids, and every parameter is in a layer that Opacus has a rule for.

Shape legend: B batch, T tokens, D d_model, H heads, K head width (D / H), V vocabulary.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import Dimensions

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the attention output of queries, keys and values; all are (B, H, T, K)."""


def causal_mask(T: int, device: torch.device) -> Tensor:
    """Return the mask that is true for later tokens, which a token must not see; (T, T) bool."""
    return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)


def mix_sdpa(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *, is_causal: bool) -> Tensor:
    """Compute attention by PyTorch's operator, which uses a fused kernel if it has one."""
    attend = functional.scaled_dot_product_attention
    y_BHTK: Tensor = attend(q_BHTK, k_BHTK, v_BHTK, is_causal=is_causal)
    return y_BHTK


def mix_eager(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *, is_causal: bool) -> Tensor:
    """Compute attention step by step; scores and probabilities, B H T^2 each, are saved."""
    T, K = q_BHTK.shape[-2:]
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) * K**-0.5
    if is_causal:
        scores_BHTT = scores_BHTT.masked_fill(causal_mask(T, q_BHTK.device), float("-inf"))
    y_BHTK: Tensor = scores_BHTT.softmax(dim=-1) @ v_BHTK
    return y_BHTK


MIXES: Mapping[str, Callable[..., Tensor]] = {"sdpa": mix_sdpa, "eager": mix_eager}


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


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a LayerNorm."""

    def __init__(self, d_model: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the block; (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        updated_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return updated_BTD


class Transformer(nn.Module):
    """Maps token ids to logits, with as many learned positions as an experiment's ``seq_len``."""

    def __init__(self, dimensions: Dimensions, experiment: Experiment) -> None:
        super().__init__()
        self.checkpointing = experiment.checkpointing, experiment.checkpointed_share
        d_model = dimensions.d_model
        self.token_embedding = nn.Embedding(dimensions.vocab_size, d_model)
        self.position_embedding = nn.Embedding(experiment.seq_len, d_model)
        build_attention = find_attention(experiment.attention)
        self.blocks = nn.Sequential(
            *(
                Block(d_model, build_attention(d_model, dimensions.heads))
                for _ in range(dimensions.layers)
            )
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, dimensions.vocab_size, bias=False)
        self.apply(_initialise)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of every next token; (B, T) int64 to (B, T, V)."""
        B, T = tokens_BT.shape
        positions_BT = torch.arange(T, device=tokens_BT.device).repeat(B, 1)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_BT)
        x_BTD = run_blocks(self.blocks, x_BTD, *self.checkpointing)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def run_blocks(
    blocks: nn.Sequential, x_BTD: Tensor, checkpointing: str, checkpointed_share: float
) -> Tensor:
    """Apply blocks one after another, with an experiment's way of checkpointing."""
    if checkpointing == "none":
        y_BTD: Tensor = blocks(x_BTD)
        return y_BTD
    chosen = choose_evenly(len(blocks), checkpointed_share)
    for block, is_chosen in zip(blocks, chosen, strict=True):
        if is_chosen:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=checkpointing == "reentrant")
        else:
            x_BTD = block(x_BTD)
    return x_BTD


def choose_evenly(count: int, share: float) -> list[bool]:
    """Return of each of ``count`` blocks whether it is among the ``share`` that is checkpointed.

    At least one is.

    Example:
        >>> choose_evenly(4, 0.5)
        [False, True, False, True]
    """
    chosen = max(1, round(count * share))
    return [(place + 1) * chosen // count > place * chosen // count for place in range(count)]


def find_attention(name: str, *, is_causal: bool = True) -> Callable[[int, int], nn.Module]:
    """Return the builder of a variant, from d_model and heads, after importing what it needs.

    Opacus is imported only for its own variant, because it takes 70 MiB.
    """
    if name == "opacus":
        module = importlib.import_module("dpprof.subjects.models.opacus_attention")
        return partial(module.OpacusAttention, make_mask=causal_mask if is_causal else None)
    mix = partial(MIXES[name], is_causal=is_causal)
    return lambda d_model, heads: Attention(d_model, heads, mix)


def _initialise(module: nn.Module) -> None:
    """Draw matrices from N(0, 0.02), as GPT-2 does (Radford et al. 2019, section 2.3)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
