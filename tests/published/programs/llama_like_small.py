"""Another transformer of that kind, with more copies, recorded from an empty allocator.

Tables of angles and the mask come from the host in every layer; softmax computes exponentials
twice; AdamW replaces parameters and state; the loss is of the last token.

Shape legend: B samples, T tokens, D width, H heads, V vocabulary.
"""

import sys

import torch
from published.programs.llama_like import Block, Linear, Model, autocast
from published.recording import Tape
from torch import Tensor, nn


class RmsNorm(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        result = x / root * self.weight
        return result.to(dtype)


def _turn(x: Tensor) -> Tensor:
    sin, cos = (torch.empty(x.shape[-2], x.shape[-1] // 2).unsqueeze(-1) for _ in range(2))
    x = x.view(*x.shape[:-1], -1, 2)
    first = cos * x[..., :1] - sin * x[..., 1:]
    second = sin * x[..., :1] + cos * x[..., 1:]
    return torch.cat([first, second], dim=-1).flatten(-2)


def _softmax(x: Tensor) -> Tensor:
    highest = x.max(dim=-1, keepdim=True)[0]
    return torch.exp(x - highest) / torch.exp(x - highest).sum(dim=-1, keepdim=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    products = torch.einsum("...qd,...kd->...qk", q, k)
    scores = products / torch.sqrt(torch.empty((), dtype=torch.int64))
    scores.masked_fill_(~mask.bool(), -torch.inf)
    weights = _softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.H = H
        self.q, self.k, self.v, self.out = (Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.view(B, T, self.H, -1).transpose(1, 2) for part in (q, k, v))
        q = _turn(q)
        k = _turn(k)
        mixed = _attend(q, k, v, torch.empty(T, T))
        mixed = mixed.transpose(1, 2).reshape(B, T, -1)
        return self.out(mixed)


def _build(*, V: int, D: int, H: int, layers: int, width: int) -> Model:
    blocks = (Block(D, width, Attention(D, H), RmsNorm) for _ in range(layers))
    return Model(V, D, blocks, RmsNorm)


def _loss(x: Tensor, labels: Tensor) -> Tensor:
    highest = x.max(dim=-1, keepdim=True)[0]
    logs = x - highest - torch.log(torch.sum(torch.exp(x - highest), dim=-1, keepdim=True))
    chosen = torch.zeros_like(logs)
    chosen.scatter_(-1, labels.unsqueeze(-1), 1)
    return -torch.sum(chosen * logs) / len(x)


class AdamW:
    def __init__(self, model: nn.Module) -> None:
        self.state = {
            p: (torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in model.parameters()
        }

    def step(self) -> None:
        for parameter, (m, v) in self.state.items():
            gradient = parameter.grad.data
            new_m = 0.9 * m + 0.1 * gradient
            self.state[parameter] = new_m, v
            new_v = 0.999 * v + 0.001 * gradient**2
            self.state[parameter] = new_m, new_v
            parameter.data = parameter.data - 0.001 * (new_m / (torch.sqrt(new_v) + 1e-8))
            parameter.data = parameter.data - 0.0 * parameter.data

    def zero_grad(self) -> None:
        for parameter in self.state:
            parameter.grad = None


_STEPS = 3


def _take_last(x: Tensor) -> Tensor:
    """Index as ``x[:, -1, :]`` did in PyTorch 2.6: ``:`` was a slice with a backward of its own."""
    every = 0, sys.maxsize
    x = torch.ops.aten.slice.Tensor(x, 0, *every).select(1, -1)
    return torch.ops.aten.slice.Tensor(x, 1, *every)


def forward(tape: Tape, *, T: int, B: int, dtype: str, **sizes: int) -> None:
    """Build, and run forward some times."""
    model = _build(**sizes)
    ids = torch.empty(B, T, dtype=torch.int64)
    for _ in range(_STEPS):
        with autocast(dtype):
            model(ids)
    tape.mark("done")


def training(tape: Tape, *, T: int, B: int, dtype: str, **sizes: int) -> None:
    """Build, and train some steps."""
    model = _build(**sizes)
    optimizer = AdamW(model)
    ids, labels = torch.empty(B, T, dtype=torch.int64), torch.empty(B, dtype=torch.int64)
    with autocast(dtype):
        for _ in range(_STEPS):
            optimizer.zero_grad()
            logits = model(ids)
            last = _take_last(logits)
            loss = _loss(last, labels)
            loss.backward()
            optimizer.step()
    tape.mark("done")
    del logits, last, loss
