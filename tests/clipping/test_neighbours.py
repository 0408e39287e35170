"""What a sample contributes depends on that sample alone, whatever else is in the batch.

The same samples are clipped alone and among others, which contribute nothing because their losses
are multiplied by zero, and may be longer; so the sums differ by what changed for the samples.
"""

import functools
import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch
from products import one_in
from small_models import EVERY, FLAT, NORMALISED, Composed, Conv1D, gradients, over_channels
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpprof.private import FlashClipping, PerLayerClipping, linear_cross_entropy

WAYS = [*EVERY, *NORMALISED]
NATURAL, CANCELLING = 1e-5, 1e-3
"""By how much of C a sample's contribution may change."""


def on_both_halves(layer: nn.Module) -> nn.Module:
    """Use a layer on the features, and on their reverse."""
    return Composed(lambda m, x: m.layer(x) + m.layer(x.flip(2)), layer=layer)


def tie(d: int, p: int) -> nn.Module:
    """A table that is the head's weight too."""

    def run(m, x):
        ids = x[:, :, 0].abs().mul(1e3).long() % m.table.num_embeddings
        return m.head(x) + m.table(ids).sum(2, keepdim=True)

    table, head = nn.Embedding(p, d), nn.Linear(d, p, bias=False)
    head.weight = table.weight
    return Composed(run, table=table, head=head)


class Table(nn.Embedding):
    """A table of as many rows as there are features."""

    def forward(self, x):
        return super().forward(x.abs().argmax(2))


def over_time(d: int, p: int, **options) -> nn.Module:
    """A convolution over tokens."""
    return over_channels(nn.Conv1d(d, p, 3, padding=1, **options))


LAYERS = {
    "linear": nn.Linear,
    "no bias": functools.partial(nn.Linear, bias=False),
    "bias alone": lambda d, p: nn.Linear(d, p).requires_grad_(False),  # thawed below
    "transposed": lambda d, p: Conv1D(p, d),
    "convolution": over_time,
    "layer norm": lambda d, _: nn.LayerNorm(d),
    "rms norm": lambda d, _: nn.RMSNorm(d),
    "groups": lambda d, p: over_time(d, p, groups=math.gcd(d, p)),
    "table": Table,
    "twice": lambda d, p: on_both_halves(nn.Linear(d, p)),
    "norm twice": lambda d, _: on_both_halves(nn.LayerNorm(d)),
    "convolution twice": lambda d, p: on_both_halves(over_time(d, p)),
    "tied": tie,
}
USED_TWICE = ("twice", "norm twice", "convolution twice", "tied")


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
    ways = FLAT if kind in USED_TWICE else WAYS
    dtype = r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    d, p = (r.choice([1, 3, 16, 40, 64]) for _ in range(2))
    p = d if "norm" in kind else p
    B, T = r.choice([1, 2, 3, 8, 64]), r.choice([1, 2, 7, longest // 2, longest])
    if kind.startswith(("convolution", "groups")):
        T = max(T, 2)  # PyTorch's convolution_backward refuses some strides of one place
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
    assert_alone(range(30), longest=64)


@pytest.mark.slow
def test_others_do_not_in_two_thousand_pairs() -> None:
    assert_alone(range(2000), longest=512)


def cancelling(d: int, p: int, dtype: torch.dtype, size: float, T: int = 4):
    """One sample whose first and third tokens cancel; the others' gradients are 2, in one element.

    What is left depends on the order in which they are added: 2 is lost beside the first alone.
    """
    x, g = torch.zeros(1, T, d, dtype=dtype), torch.zeros(1, T, p, dtype=dtype)
    x[0, 0, 0] = x[0, 2, 0] = g[0, 0, 0] = size
    g[0, 2, 0] = -size
    x[0, 1, 0] = x[0, 3, 1] = 1
    g[0, 1, 0] = g[0, 3, 1] = 2
    return x, g


SIZES = {torch.float32: 1e5, torch.bfloat16: 2.0**17, torch.float64: 1e12}


@pytest.mark.parametrize(
    ("dtype", "kind", "way"),
    one_in(6, [torch.float32, torch.float64, torch.bfloat16], sorted(LAYERS), WAYS),
)
def test_cancelling_samples_contribute_the_same_with_others(dtype, kind, way) -> None:
    if kind in USED_TWICE and way is PerLayerClipping:
        pytest.skip("it refuses a second use")
    x, g = cancelling(64, 64, real_of(dtype), SIZES[dtype])
    case = Case(way, kind, 64, 64, dtype)
    twenty = [one.expand(20, -1, -1) for one in (x, g)]
    assert find_change(case, x, g, more=1, before=0, after=0) <= 1e-6
    assert find_change(case, *twenty, more=1, before=0, after=36) <= 20e-6
    assert find_change(case, x, g, more=1, before=3, after=60) <= 1e-6
    moved = case.sum(*twenty, torch.ones(20).to(x))
    assert float(moved.norm()) == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("of_inputs", "of_gradients", "bound"), [(1e10, 1e10, 1), (3e-23, 1e18, 1e-2), (1e-25, 1e25, 1)]
)
def test_squares_that_overflow_or_underflow_change_nothing(
    of_inputs, of_gradients, bound, way
) -> None:
    x, g = of_inputs * torch.randn(1, 4, 32), of_gradients * torch.randn(1, 4, 32)
    for kind in ("linear", "no bias", "convolution"):
        case = Case(way, kind, 32, 32, bound=bound)
        for more, after in ((1, 0), (1, 60), (0, 9)):
            assert find_change(case, x, g, more=more, before=0, after=after) <= 1e-6


@pytest.mark.parametrize("ratio", [90.0, 120.0, 127.0, 129.0, 140.0, 1000.0])
def test_nothing_jumps_where_samples_begin_to_be_measured_alone(ratio, way) -> None:
    x, g = torch.randn(1, 1, 64).expand(1, 8, -1), torch.randn(1, 8, 48)
    g = g - g.mean(1, keepdim=True)
    own = torch.einsum("btd,btp->bpd", x, g).norm() + x[:, :1].norm() * g[:, :1].norm()
    g[:, 0] *= 1 + float(x.norm() * g.norm() / own) / ratio
    for kind in ("no bias", "linear", "convolution"):
        case = Case(way, kind, 64, 48)
        for more, after in ((0, 40), (1, 0), (3, 120)):
            assert find_change(case, x, g, more=more, before=0, after=after) <= 1e-5


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("way", EVERY)
def test_tokens_of_a_head_that_cancel_contribute_the_same_with_others(way, keep) -> None:
    """Two tokens are alike, and their losses have weights of opposite signs."""

    def clip(more: int, after: int) -> torch.Tensor:
        torch.manual_seed(0)
        head = nn.Linear(16, 40, bias=False)
        clipping = way(head, 1.0, first_batch="trusted")
        x, labels = torch.randn(1 + more, 4 + after, 16), torch.randint(40, (1 + more, 4 + after))
        sample = torch.Generator().manual_seed(1)
        x[0], labels[0], weights = 0, 0, torch.zeros(1 + more, 4 + after)
        x[0, :4] = torch.randn(4, 16, generator=sample)
        x[0, 2] = x[0, 0]
        weights[0, :4] = torch.tensor([2e3, 1.0, -2e3, 1.0])
        losses = linear_cross_entropy(x, head, labels, keep=keep)
        clipping.backward((losses * weights).sum(1))
        return gradients(head)

    alone = clip(0, 0)
    assert float(alone.norm()) == pytest.approx(1, rel=0.01)
    for more, after in ((1, 0), (0, 60), (3, 9)):
        assert (clip(more, after) - alone).norm() <= CANCELLING


def test_a_model_that_draws_other_numbers_when_a_sample_is_measured_alone_is_refused() -> None:
    layer, calls = nn.Linear(64, 64, bias=False), itertools.count()
    x, g = cancelling(64, 64, torch.float32, 1e5)
    clipping = FlashClipping(layer, 1.0, first_batch="trusted")
    y = layer(x)
    y.register_hook(lambda g: g * (3.0 if next(calls) == 1 else 1.0))
    with pytest.raises(RuntimeError, match="another gradient of a sample was summed"):
        clipping.backward((y * g).sum((1, 2)))
