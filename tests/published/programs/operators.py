"""Operators of language models in plain PyTorch; most run some times, and the last is measured.

Attention is one forward pass, with backward passes before it as a benchmark has them.

Shape legend: B samples, T tokens, N rows, D and H widths, V vocabulary.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
import torch.utils.checkpoint
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional

Mode = Literal["full", "forward", "backward"]
_RUNS = 3
"""From the second on gradients are there."""


def take_handles() -> None:
    """Compute products in both threads, as earlier benchmarks of the process have done."""
    scalar = torch.empty(1, 1, requires_grad=True)
    (scalar @ scalar).sum().backward()


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


def _scores(q_BTD: Tensor, k_BTD: Tensor) -> Tensor:
    return q_BTD @ k_BTD.transpose(-2, -1) / math.sqrt(q_BTD.shape[-1])


def softmax_of_steps(x: Tensor) -> Tensor:
    """Compute softmax by single operators; keeps exponentials, sums and indices of maxima."""
    shifted = x - x.max(dim=-1, keepdim=True)[0]
    powers = shifted.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


def attention_of_steps(tape: Tape, *, B: int, T: int, D: int) -> None:
    """Keep the last result, and a gradient of the result, over the measured forward pass."""
    q, k, v = (torch.empty(B, T, D, requires_grad=True) for _ in range(3))
    gradient = torch.empty(B, T, D)
    last = softmax_of_steps(_scores(q, k)) @ v
    last.backward(gradient)
    for leaf in (q, k, v):
        leaf.grad = None
    result = softmax_of_steps(_scores(q, k)) @ v
    tape.mark("forward done")
    del result


def attention(tape: Tape, *, B: int, T: int, D: int) -> None:
    """Use ``torch.softmax``; gradients of queries, keys and values go to the host."""
    q, k, v = (torch.empty(B, T, D, requires_grad=True) for _ in range(3))
    result = torch.softmax(_scores(q, k), dim=-1) @ v
    torch.autograd.grad(result.sum(), (q, k, v))
    result = torch.softmax(_scores(q, k), dim=-1) @ v
    tape.mark("forward done")
    del result


def linear_steps(tape: Tape, *, batch: int, accumulate: int, steps: int) -> None:
    """Train one matrix by SGD; the input of a step stays until the next one is there."""
    weight = torch.empty(1024, 32, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x = torch.empty(batch, 32, 1024)
            y = x.matmul(weight)
            loss = y.sum()
            loss.backward()
        with tape.phase("step"):
            optimizer.step()
    del x, y, loss


def softmax_step(tape: Tape) -> None:
    """Average the softmax of a tensor of 2,880 MiB."""
    x = torch.empty(5120, 2, 384, 384, dtype=torch.bfloat16, requires_grad=True)
    tape.mark("made")
    x = functional.softmax(x, dim=-1)
    loss = x.mean()
    tape.mark("forward done")
    loss.backward()
    tape.mark("backward done")


def wide_layers(tape: Tape) -> None:
    """Run three linear layers checkpointed, copy the gradients, and run them again without."""
    sizes = 1000, 40000, 1000, 5
    model = nn.Sequential()
    for wide, narrow in pairwise(sizes):
        model += nn.Sequential(nn.Linear(wide, narrow), nn.ReLU())
    x = torch.empty(10, 1000, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=True)
    out.sum().backward()
    tape.mark("checkpointed")
    copies: list[Tensor] = [out.detach().clone()]
    copies += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    y = x.clone().detach()
    out = model(y)
    copies.append(out.detach().clone())
    model.zero_grad()
    out.sum().backward()
