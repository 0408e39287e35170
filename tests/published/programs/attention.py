"""One forward pass of eager attention, with backward passes before it as a benchmark has them.

Shape legend: B samples, T tokens, D width.
"""

import math

import torch
from published.recording import Tape
from torch import Tensor


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
