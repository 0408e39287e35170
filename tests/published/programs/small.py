"""A few operators whose peak somebody published."""

from itertools import pairwise

import torch
import torch.utils.checkpoint
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional


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
    copies += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    y = x.clone().detach()
    out = model(y)
    copies.append(out.detach().clone())
    model.zero_grad()
    out.sum().backward()
