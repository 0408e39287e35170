"""Operators of language models in plain PyTorch, run some times, of which the last is measured.

Shape legend: B samples, T tokens, N rows, H width, V vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import torch
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional

Mode = Literal["full", "forward", "backward"]
_RUNS = 3
"""From the second on gradients are there."""


def take_handles() -> None:
    """Compute products in both threads, as earlier benchmarks of the process have done."""
    one = torch.empty(1, 1, requires_grad=True)
    (one @ one).sum().backward()


def _measure(
    tape: Tape, forward: Callable[[], Tensor], mode: Mode = "full", *, retain: bool = False
) -> None:
    """Run a pass some times, and mark the begin of the last."""
    if mode == "backward":
        kept = forward()
        gradient = torch.empty_like(kept)
    for _ in range(_RUNS):
        tape.mark("last run")
        if mode == "backward":
            kept.backward(gradient, retain_graph=True)
        else:
            y = forward()
            if mode == "full":
                y.backward(None if y.dim() == 0 else torch.empty_like(y), retain_graph=retain)
            del y


def cross_entropy(tape: Tape, *, N: int, V: int) -> None:
    x = torch.empty(N, V, requires_grad=True)
    labels = torch.empty(N, 1, dtype=torch.int64).squeeze(1)
    _measure(tape, lambda: functional.cross_entropy(x, labels))


def lm_head(tape: Tape, *, N: int, H: int, V: int) -> None:
    """Project to a vocabulary, and compute the loss; the benchmark makes a second projection."""
    x = torch.empty(N, H, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.empty(N, 1, dtype=torch.int64).squeeze(1)
    spare, head = (nn.Linear(H, V, bias=False, dtype=torch.bfloat16) for _ in range(2))
    _measure(tape, lambda: functional.cross_entropy(head(x), labels))
    del spare


def embedding(tape: Tape, *, B: int, T: int, V: int, D: int) -> None:
    """Look tokens up; the benchmark makes a second table."""
    ids = torch.empty(B, T, dtype=torch.int64)
    spare, table = nn.Embedding(V, D), nn.Embedding(V, D)
    _measure(tape, lambda: table(ids))
    del spare


def gated_units(
    tape: Tape, *, B: int, T: int, H: int, width: int, act: str, mode: Mode = "full"
) -> None:
    """Multiply two projections, one of them through an activation, and project back."""
    take_handles()
    x = torch.empty(B, T, H, dtype=torch.bfloat16, requires_grad=True)
    shapes = (H, width), (H, width), (width, H)
    gate, up, down = (nn.Linear(*shape, bias=False, dtype=torch.bfloat16) for shape in shapes)

    def activate(y: Tensor) -> Tensor:
        return functional.silu(y) if act == "silu" else functional.gelu(y, approximate="tanh")

    _measure(tape, lambda: down(activate(gate(x)) * up(x)), mode, retain=True)


def layer_norm(tape: Tape, *, N: int, H: int) -> None:
    """Normalise; the benchmark makes a second module."""
    spare, norm = nn.LayerNorm(H), nn.LayerNorm(H)
    x = torch.empty(N, H)
    gradient = torch.empty_like(x)
    x.requires_grad_()
    _measure_with(tape, lambda: norm(x), gradient)
    del spare


def rms_norm(tape: Tape, *, N: int, H: int) -> None:
    """Compute in float32 and multiply by a weight in float32; the input has 16 bits."""
    weight = nn.Parameter(torch.empty(H))
    spare = torch.empty(H)  # the benchmark makes a second module
    x = torch.empty(N, H, dtype=torch.bfloat16)
    gradient = torch.empty_like(x)
    x.requires_grad_()

    def forward() -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(torch.bfloat16)

    _measure_with(tape, forward, gradient)
    del spare


def _measure_with(tape: Tape, forward: Callable[[], Tensor], gradient: Tensor) -> None:
    for _ in range(_RUNS):
        tape.mark("last run")
        y = forward()
        y.backward(gradient, retain_graph=True)
        del y


def rope(tape: Tape, *, T: int, H: int, q_heads: int, kv_heads: int) -> None:
    """Rotate queries and keys; their gradients are returned, not kept."""
    width = H // q_heads
    frequencies = torch.empty(width // 2)
    q, k = (
        torch.empty(1, T, heads, width, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
        for heads in (q_heads, kv_heads)
    )
    gradients = torch.empty_like(q), torch.empty_like(k)
    positions = torch.empty(1, T, dtype=torch.int64)
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = (f(angles).to(torch.bfloat16).unsqueeze(1) for f in (torch.cos, torch.sin))
    del angles

    def turn(x: Tensor) -> Tensor:
        straight = x * cos
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return straight + torch.cat((-second, first), dim=-1) * sin

    for _ in range(_RUNS):
        tape.mark("last run")
        turned = turn(q), turn(k)
        torch.autograd.grad(turned, (q, k), gradients, retain_graph=True)
        del turned
