"""A GPT of PyTorch's modules with eager attention and dropout; clipped by norm, AdamW at once.

Shape legend: B samples, T tokens, D width, H heads, V vocabulary.
"""

import math

import torch
from published.programs.gpt2 import DROPOUT, Gelu, Model
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, D: int, H: int, T: int) -> None:
        super().__init__()
        self.H = H
        self.before_attention = nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.dropouts = nn.ModuleList(nn.Dropout(DROPOUT) for _ in range(2))
        self.register_buffer("mask", torch.empty(1, 1, T, T))
        self.before_mlp = nn.LayerNorm(D)
        self.mlp = nn.Sequential(
            nn.Linear(D, 4 * D), Gelu(), nn.Linear(4 * D, D), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))

    def attend(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.H, -1).transpose(1, 2) for part in self.qkv(x).split(D, 2))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        weights = weights.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        weights = functional.softmax(weights, dim=-1)
        weights = self.dropouts[0](weights)
        mixed = weights @ v
        mixed = mixed.transpose(1, 2).contiguous().view(B, T, D)
        return self.dropouts[1](self.out(mixed))


def training(
    tape: Tape, *, V: int, D: int, H: int, layers: int, B: int, T: int, steps: int
) -> None:
    """Train; gradients of the step before are there during forward."""
    with torch.device("meta"):
        model = Model(V, D, T, (Block(D, H, T) for _ in range(layers)), nn.LayerNorm)
    model.to_empty(device="cpu")
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    decayed = {id(matrix) for matrix in matrices}
    groups = matrices, [p for p in model.parameters() if id(p) not in decayed]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])

    def step() -> Tensor:
        """Leave the loss behind, and nothing else."""
        ids, labels = (torch.empty(B, T, dtype=torch.int64) for _ in range(2))
        logits, loss = model(ids, labels)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with tape.phase("step"):
            optimizer.step()
        tape.mark("stepped")
        del logits  # a variable holds it until here
        return loss.detach()

    for _ in range(steps):
        tape.mark("last step")
        loss = step()
    del loss
