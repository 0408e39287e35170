"""A transformer with RMSNorm, SwiGLU, rotary positions and eager attention, of single operators.

AdamW is a loop over parameters that replaces its state tensors.

Shape legend: B samples, T tokens, D width, H heads, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from published.programs.operators import softmax_of_steps
from published.recording import Tape
from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(narrow, wide))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RmsNorm(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Attention(nn.Module):
    def __init__(self, D: int, H: int, angles: Tensor) -> None:
        super().__init__()
        self.H, self.angles = H, angles
        self.q, self.k, self.v, self.out = (Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            project(x).view(B, T, self.H, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = _turn(q, self.angles), _turn(k, self.angles)
        positions = torch.arange(T)
        mask = (positions[:, None] >= positions[None, :])[None]
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
        scores = torch.where(mask, scores, float("-inf"))
        weights = softmax_of_steps(scores)
        mixed = torch.einsum("...qk,...kd->...qd", weights, v)
        return self.out(mixed.transpose(1, 2).reshape(B, T, -1))


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    even, odd = x.view(*x.shape[:-1], -1, 2).movedim(-1, 0).unbind(0)
    cos, sin = angles[:, : x.shape[-2], :].unbind(0)
    turned = cos * even - sin * odd
    return torch.cat((turned, sin * even + cos * odd), dim=-1)


class Gated(nn.Module):
    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(D, width), Linear(width, D), Linear(D, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_silu(self.gate(x)) * self.up(x))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, D: int, width: int, attention: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.attention, self.gated = attention, Gated(D, width)
        self.before_attention, self.before_gated = norm(D), norm(D)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.before_attention(x))
        x = x + attended
        gated = self.gated(self.before_gated(x))
        return x + gated


class Model(nn.Module):
    def __init__(
        self, V: int, D: int, blocks: Iterable[nn.Module], norm: type[nn.Module] = RmsNorm
    ) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(V, D))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = norm(D), Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = embedded = self.table[ids, :]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        del embedded  # in the source a variable holds it until here
        return logits


def _build(*, V: int, T: int, D: int, H: int, layers: int, width: int) -> Model:
    def blocks() -> Iterator[Block]:
        angles = torch.empty(2, T, D // H // 2)
        for _ in range(layers):
            yield Block(D, width, Attention(D, H, angles), RmsNorm)

    return Model(V, D, blocks())


def _log_softmax(x: Tensor) -> Tensor:
    highest = x.max(dim=-1, keepdim=True)[0]
    x = x - highest
    return x - x.exp().sum(dim=-1, keepdim=True).log()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    losses = -_log_softmax(logits)
    return losses.gather(-1, labels.unsqueeze(-1)).mean()


class AdamW:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self) -> None:
        for parameter in self.parameters:
            gradient = parameter.grad.data
            state = self.state.setdefault(parameter, {})
            # The default is made even where it is not used.
            m = state.get("m", torch.zeros_like(gradient))
            v = state.get("v", torch.zeros_like(gradient))
            new_m = 0.9 * m + 0.1 * gradient
            new_v = 0.999 * v + 0.001 * torch.square(gradient)
            parameter.data -= 0.001 * new_m / (torch.sqrt(new_v) + 1e-8)
            parameter.data -= 0.001 * parameter.data
            state["m"], state["v"] = new_m, new_v

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def autocast(dtype: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def training(tape: Tape, *, T: int, B: int, dtype: str, run_up: int, **sizes: int) -> None:
    """Train some steps, and another one, which is measured."""
    model = _build(T=T, **sizes)
    optimizer = AdamW(model.parameters())
    ids, last_ids, labels, last_labels = (
        torch.empty(n, B, T, dtype=torch.int64) for n in (_BATCHES, 1, _BATCHES, 1)
    )
    batches = [*zip(ids[:run_up], labels, strict=False), (last_ids[0], last_labels[0])]
    for step, (some, others) in enumerate(batches):
        if step == run_up:
            logits = loss = None
            tape.mark("last step")
        with autocast(dtype):
            logits = model(some)
            loss = _cross_entropy(logits, others)
        loss.backward()
        optimizer.step()
        tape.mark("stepped")
        optimizer.zero_grad()
    del logits, loss


_BATCHES = 5
"""Allocated for the steps that the source runs first, all at once."""


def keeping_results(tape: Tape, *, T: int, B: int, **sizes: int) -> None:
    """Let gradients add up, and keep logits and loss until those of the next step are there."""
    model = _build(T=T, **sizes)
    ids, labels = (torch.empty(B, T, dtype=torch.int64) for _ in range(2))
    for _ in range(2):
        tape.mark("last step")
        logits = model(ids)
        loss = _cross_entropy(logits, labels)
        loss.backward()
    tape.mark("stepped")
    del logits, loss


def inference(tape: Tape, *, T: int, B: int, dtype: str, **sizes: int) -> None:
    """Compute logits some times; the last one is measured."""
    model = _build(T=T, **sizes)
    ids, last_ids = (torch.empty(n, B, T, dtype=torch.int64) for n in (_BATCHES, 1))
    with torch.no_grad():
        for at in range(2):
            with autocast(dtype):
                model(ids[at])
        tape.mark("last step")
        with autocast(dtype):
            model(last_ids[0])
