"""A GPT-2 of single operators or of PyTorch's modules, trained from an empty allocator.

Shape legend: B samples, T tokens, D width, H heads, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional

T, D, H, LAYERS, DROPOUT = 1024, 768, 12, 12, 0.1
Norms = Callable[[int], nn.Module]


class Variant(NamedTuple):
    """What the source changes, one thing after the other."""

    kept_mask: bool = False
    fused_optimizer: bool = False
    bfloat16: bool = False
    native_modules: bool = False
    fused_attention: bool = False
    V: int = 50257
    B: int = 8


class Norm(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.weight * normal + self.bias


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        half = 0.5 * x
        return half * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.out = nn.Linear(D, D)
        self.dropout = nn.Dropout(DROPOUT)
        if variant.kept_mask:
            self.register_buffer("mask", torch.empty(T, T))
        self.kept_mask = variant.kept_mask

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        k, q, v = self.k(x), self.q(x), self.v(x)
        k, v, q = (part.view(n, t, H, -1).transpose(1, 2) for part in (k, v, q))
        scores = q @ k.transpose(2, 3)
        if self.kept_mask:
            mask = self.mask.bool()[:t, :t]
        else:
            mask = torch.triu(torch.ones(t, t, dtype=torch.bool), diagonal=1)
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        mixed = (weights @ v).transpose(1, 2)
        mixed = mixed.reshape(n, t, D)
        return self.out(mixed)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        qkv = self.qkv(x).view(n, t, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        dropout = DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(n, t, D))


class Block(nn.Module):
    """Attention and an MLP, each after a norm and before a dropout."""

    def __init__(self, D: int, attention: nn.Module, gelu: nn.Module, norm: Norms) -> None:
        super().__init__()
        self.before_attention, self.attention, self.before_mlp = norm(D), attention, norm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), gelu, nn.Linear(4 * D, D))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class Model(nn.Module):
    """Returns logits and, given labels, the mean loss."""

    def __init__(self, V: int, D: int, T: int, blocks: Iterable[Block], norm: Norms) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = norm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        of_tokens = self.tokens(ids)
        of_positions = self.positions(torch.arange(ids.shape[1]))
        x = of_tokens + of_positions
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits, loss = self.head(x), None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        del of_tokens, of_positions  # in the sources variables hold them until here
        return logits, loss


def _build(variant: Variant) -> Model:
    norm = nn.LayerNorm if variant.native_modules else Norm

    def block() -> Block:
        attention = FusedAttention() if variant.fused_attention else Attention(variant)
        gelu = nn.GELU(approximate="tanh") if variant.native_modules else Gelu()
        return Block(D, attention, gelu, norm)

    return Model(variant.V, D, T, (block() for _ in range(LAYERS)), norm)


def _loss(model: Model, B: int) -> Tensor:
    ids, labels = (torch.empty(B, T, dtype=torch.int64) for _ in range(2))
    _, loss = model(ids, labels)
    return loss


def training(tape: Tape, *, steps: int, tokens: int, **changes: Any) -> None:
    """Build, train some steps with an evaluation after the first, and generate text."""
    variant = Variant(**changes)
    with torch.device("meta"):
        model = _build(variant)
    model.to_empty(device="cpu")
    if variant.bfloat16:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=variant.fused_optimizer or None)
    for step in range(steps):
        if step == steps - 1:
            tape.mark("last step")
        optimizer.zero_grad()
        loss = _loss(model, variant.B)
        loss.backward()
        # A fused step keeps its step counts on the device.
        with tape.phase("backward" if variant.fused_optimizer else "step"):
            optimizer.step()
        tape.mark("stepped")
        if step == 0:
            _evaluate(model, variant.B)
    _generate(model, tokens)
    tape.mark("trained")
    del loss


def _evaluate(model: Model, B: int) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            loss = _loss(model, B)
    model.train()
    del loss


def _generate(model: Model, tokens: int) -> None:
    model.eval()
    ids = torch.empty(1, 4, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(tokens):
            window = ids[:, -T:]
            logits, _ = model(window)
            logits = logits[:, -1, :]
            chosen = torch.argmax(logits, dim=-1, keepdim=True)
            ids = torch.cat((ids, chosen), dim=1)
    model.train()
