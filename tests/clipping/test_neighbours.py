"""What a sample contributes depends on that sample alone, whatever else is in the batch.

In each pair of batches the same samples have the same inputs X and output gradients G; the second
batch has more samples, which contribute nothing because their losses are multiplied by zero, and
may be longer, so that the others are padded before or after; or the first comes in parts. So the
difference of the sums is what the others' contributions changed by.
"""

import functools
import random
from typing import NamedTuple

import pytest
import torch
from small_models import EVERY, FLAT, Conv1D, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpprof.clipping.per_layer import PerLayerClipping

WAYS = [*EVERY, *(functools.partial(way, stability=0.01) for way in FLAT)]
NATURAL, CANCELLING = 1e-5, 1e-3
"""By how much of C a sample's contribution may change."""


class Twice(nn.Module):
    """A layer on the first and on the second half of the features."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) + self.layer(x.flip(2))


class OverTime(nn.Conv1d):
    """A convolution over tokens."""

    def forward(self, x):
        return super().forward(x.mT).mT


class Tied(nn.Module):
    """A table that is the head's weight too."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(p, d), nn.Linear(d, p, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        ids = x[:, :, 0].abs().mul(1e3).long() % self.table.num_embeddings
        return self.head(x) + self.table(ids).sum(2, keepdim=True)


LAYERS = {
    "linear": nn.Linear,
    "no bias": functools.partial(nn.Linear, bias=False),
    "bias alone": lambda d, p: nn.Linear(d, p).requires_grad_(False),  # thawed below
    "transposed": lambda d, p: Conv1D(p, d),
    "convolution": lambda d, p: OverTime(d, p, 3, padding=1),
    "layer norm": lambda d, _: nn.LayerNorm(d),
    "twice": lambda d, p: Twice(nn.Linear(d, p)),
    "tied": Tied,
}


class Case(NamedTuple):
    """A layer, and how it is clipped."""

    way: object
    kind: str
    d: int
    p: int
    dtype: torch.dtype = torch.float32
    is_checkpointed: bool = False
    parts: int = 1
    bound: float = 1.0

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        layer = LAYERS[self.kind](self.d, self.p)
        if self.kind == "bias alone":
            layer.bias.requires_grad_(True)
        return layer.double() if self.dtype is torch.float64 else layer

    def sum(self, x: torch.Tensor, g: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of clipped gradients of samples, in parts."""
        layer = self.build()
        clipping = self.way(layer, self.bound, first_batch="trusted")
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(*(one.chunk(self.parts) for one in (x, g, weights)), strict=True):
            total = total + self._sum_part(layer, clipping, *part)
            layer.zero_grad()
        return total

    def _sum_part(self, layer, clipping, x, g, weights) -> torch.Tensor:
        x.requires_grad_(self.is_checkpointed)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            y = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        clipping.backward((y.to(g) * g).sum((1, 2)) * weights)
        return gradients(layer)


def real_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype


def pad(one: torch.Tensor, before: int, after: int) -> torch.Tensor:
    return nn.functional.pad(one, (0, 0, before, after))


def find_change(case: Case, x, g, *, more: int, before: int, after: int) -> float:
    """By how much of C the sum changes if longer samples that contribute nothing are added."""
    ones = torch.ones(len(x), dtype=x.dtype)
    alone = case._replace(parts=1).sum(x, g, ones)
    others = [torch.randn(more, x.shape[1] + before + after, one.shape[2]).to(x) for one in (x, g)]
    both = [
        torch.cat([pad(one, before, after), other])
        for one, other in zip((x, g), others, strict=True)
    ]
    order = torch.randperm(len(both[0]))
    weights = torch.cat([ones, torch.zeros(more, dtype=x.dtype)])
    return float((case.sum(*(one[order] for one in (*both, weights))) - alone).norm()) / case.bound


def draw_pair(seed: int, longest: int) -> tuple[Case, torch.Tensor, torch.Tensor, dict[str, int]]:
    """Draw a case, samples, and what is added to them; every other pair of samples cancels."""
    torch.manual_seed(seed)
    r = random.Random(seed)  # noqa: S311 (it draws test cases)
    kind = r.choice(sorted(LAYERS))
    ways = FLAT if kind in ("tied", "twice") else WAYS
    dtype = r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    d, p = (r.choice([1, 3, 16, 40, 64]) for _ in range(2))
    p = d if kind == "layer norm" else p
    B, T = min(r.choice([1, 2, 3, 8, 64]), 2**12 // longest + 2), r.choice([1, 2, 7, longest // 2])
    case = Case(r.choice(ways), kind, d, p, dtype, r.random() < 0.3, r.choice([1, 1, 2]), 0.1)
    real = real_of(dtype)
    x, g = torch.randn(B, T, d, dtype=real), torch.randn(B, T, p, dtype=real)
    if seed % 2 and T > 1:
        x = torch.randn(B, 1, d, dtype=real) + r.choice([1e-6, 1e-3, 1e-1]) * x
        g = r.choice([1.0, 1e3]) * (g - g.mean(1, keepdim=True))
    before = r.choice([0, 0, 1, 5])
    after = r.choice([0, 3, longest - before - T])
    return case, x, g, {"more": r.choice([0, 1, 2, 9]), "before": before, "after": max(0, after)}


def assert_alone(seeds: range, longest: int) -> None:
    worst = {NATURAL: 0.0, CANCELLING: 0.0}
    for seed in seeds:
        case, x, g, added = draw_pair(seed, longest)
        change = find_change(case, x, g, **added) / len(x)
        limit = CANCELLING if seed % 2 else NATURAL
        assert change <= limit, (seed, case, added, x.shape)
        worst[limit] = max(worst[limit], change)
    print(worst)


def test_others_do_not_change_what_samples_contribute() -> None:
    assert_alone(range(120), longest=64)


@pytest.mark.slow
def test_others_do_not_in_two_thousand_pairs() -> None:
    assert_alone(range(2000), longest=512)


def cancelling(d: int, p: int, dtype: torch.dtype, size: float, T: int = 4):
    """One sample whose tokens cancel but for one of them, whose gradient is 2."""
    x, g = torch.zeros(1, T, d, dtype=dtype), torch.zeros(1, T, p, dtype=dtype)
    x[0, 0, 0] = x[0, 1, 0] = g[0, 0, 0] = size
    g[0, 1, 0] = -size
    x[0, 2, 1], g[0, 2, 1] = 1, 2
    return x, g


SIZES = {torch.float32: 1e3, torch.bfloat16: 1024.0, torch.float64: 1e9}
KINDS = ["linear", "no bias", "transposed", "convolution", "twice", "bias alone", "tied"]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_cancelling_samples_contribute_the_same_with_others(dtype, kind, way) -> None:
    if kind in ("tied", "twice") and way is PerLayerClipping:
        pytest.skip("it refuses a second use")
    x, g = cancelling(64, 64, real_of(dtype), SIZES[dtype])
    case = Case(way, kind, 64, 64, dtype)
    twenty = [one.expand(20, -1, -1) for one in (x, g)]
    assert find_change(case, x, g, more=1, before=0, after=0) <= 1e-6
    assert find_change(case, *twenty, more=1, before=0, after=36) <= 20e-6
    assert find_change(case, x, g, more=1, before=3, after=60) <= 1e-6
    moved = case.sum(*twenty, torch.ones(20).to(x))
    assert float(moved.norm()) == pytest.approx(20, rel=0.02)
