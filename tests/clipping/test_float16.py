"""Clipping in float16: a fixed scale of losses, samples that overflow, and 16-bit parameters."""

import math

import pytest
import torch
from small_models import EVERY, gradients, one_by_one, private
from torch import Tensor, nn

from dpprof.private import (
    BookKeeping,
    linear_cross_entropy,
)
from dpprof.private.contributions.contributions import Product
from dpprof.private.norms.placement import as_if_on_cuda

SLOW_BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.slow)
SCALE = 2.0**16
B, T, D, P = 5, 4, 12, 3
BOUND = 0.05


class Tower(nn.Module):
    """Two matrices with a norm and a table; losses are small, as of long samples."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(7, D), nn.Linear(D, D)
        self.norm, self.last = nn.LayerNorm(D), nn.Linear(D, P, bias=False)
        self.size = size

    def losses(self, ids_BT: Tensor, sizes_B: Tensor) -> Tensor:
        out_BTP = self.last(self.norm(torch.relu(self.first(self.table(ids_BT))))).float()
        return self.size * sizes_B * out_BTP.square().mean((1, 2))


def make(size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tower:
    torch.manual_seed(0)
    return Tower(size).to(dtype)


def draw(samples: int = B, tokens: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(7, (samples, tokens), generator=generator), torch.ones(samples)


def error(model: Tower, batch: tuple[Tensor, Tensor], bound: float) -> float:
    """How far its gradients are from those of its samples alone, in float64."""
    exact = make(model.size, torch.float64)
    exact.load_state_dict(model.state_dict())
    ids_BT, sizes_B = batch
    expected = one_by_one(exact.losses, exact, (ids_BT, sizes_B.double()), bound)[1]
    return float((gradients(model) - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float16, SLOW_BFLOAT16])
@pytest.mark.parametrize("samples", [B, T])
def test_sums_in_16_bits_are_those_of_the_definition(way, dtype, samples) -> None:
    """Autocast, and parameters in 16 bits; also where there are as many samples as tokens."""
    for stored in (torch.float32, dtype):
        model = make(dtype=stored)
        clipping = way(model, BOUND, loss_scale=SCALE if dtype == torch.float16 else 1)
        with torch.autocast("cpu", dtype, enabled=stored == torch.float32):
            losses_B = model.losses(*draw(samples))
        clipping.backward(losses_B)

        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert error(model, draw(samples), BOUND) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("way", EVERY)
def test_a_scale_changes_no_bit_where_nothing_vanishes(way) -> None:
    """In float32 nothing does; norms are those without a scale, too."""
    found = []
    for scale in (1, 2, SCALE):
        model = make()
        clipping = way(model, BOUND, loss_scale=scale)
        clipping.backward(model.losses(*draw()))
        found.append([clipping.sample_norms, *(p.grad for p in model.parameters())])
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def test_gradients_that_vanish_without_a_scale_are_kept_with_one() -> None:
    """2^-20 of a gradient is below the least number of float16."""
    for scale, is_kept in ((1, False), (2.0**20, True)):
        model = make(2.0**-20)
        clipping = BookKeeping(model, 1.0, loss_scale=scale)
        with torch.autocast("cpu", torch.float16):
            losses_B = model.losses(*draw())
        clipping.backward(losses_B)

        assert (error(model, draw(), 1.0) < 0.02) == is_kept


def test_a_sample_that_overflows_is_excluded_and_counted(way) -> None:
    """The others' contributions are those of a batch without it, to the bit."""
    ids_BT, sizes_B = draw()
    sums = []
    for size in (1e6, 0.0):
        sizes_B[2] = size
        model = make()
        clipping = way(model, BOUND, loss_scale=SCALE)
        with torch.autocast("cpu", torch.float16):
            losses_B = model.losses(ids_BT, sizes_B)
        assert losses_B.isfinite().all()
        clipping.backward(losses_B)
        sums.append([p.grad for p in model.parameters()])
        assert clipping.nonfinite_samples == (1 if size else 0)
    assert all(map(torch.equal, *sums))


@pytest.mark.parametrize("dtype", [torch.float16, SLOW_BFLOAT16])
def test_no_sample_of_any_size_exceeds_the_bound(way, dtype) -> None:
    """Each alone, from 1e-30 to 1e30, at the scale of losses and at none."""
    ids_BT, _ = draw(1)
    for scale in (1, SCALE):
        for exponent in range(-30, 31, 6):
            model = make(dtype=dtype)
            clipping = way(model, BOUND, loss_scale=scale)
            clipping.backward(model.losses(ids_BT, torch.tensor([10.0**exponent])))
            norm = math.hypot(*(float(p.grad.double().norm()) for p in model.parameters()))

            assert norm <= BOUND * (1 + 2**-8)
            assert clipping.nonfinite_samples == (0 if norm or exponent < 0 else 1)


def test_a_sum_is_not_rounded_to_16_bits_before_noise() -> None:
    """4,097 samples of 1 each: in float16 the last one would add nothing, or four."""
    model = nn.Linear(1, 1, bias=False).half()
    clipping = BookKeeping(model, 1.0, first_batch="trusted")
    optimizer = private(clipping, model)
    x = torch.ones(4097, 1, dtype=torch.float16)
    clipping.backward(model(x).float().squeeze(1) * 2)
    assert float(clipping.sums.part[model.weight]) == pytest.approx(4097, abs=0.01)
    optimizer.step()
    assert model.weight.grad.dtype == torch.float16


def test_scales_that_round_are_refused() -> None:
    for scale in (0, 3, 1000.0, -2, 0.5, math.inf, math.nan, 2.0**40):
        with pytest.raises(ValueError, match=r"loss_scale must be a power of two .* is"):
            BookKeeping(nn.Linear(2, 2), 1.0, loss_scale=scale)


def test_a_check_covers_float16(way) -> None:
    model = make(2.0**-10)
    clipping = way(model, 1e-3, loss_scale=SCALE)
    losses_of = torch.autocast("cpu", torch.float16)(model.losses)

    assert "gradient" in str(clipping.check(losses_of, *draw()))


def test_a_gpu_sums_weighted_float16_in_float32() -> None:
    """A weight of 2^-30 makes nothing of a number in float16, and a 2^-30th of one in float32."""
    x_BTd, g_BTp = (torch.rand(2, 3, n).half() for n in (4, 5))
    weights_B = torch.tensor([2.0**-30, 2.0**-20])
    with as_if_on_cuda():
        product = Product(x_BTd, g_BTp)
        assert not product.is_rounded
        found = product.sum(weights_B)

    exact = torch.einsum("b,btp,btd->pd", weights_B.double(), g_BTp.double(), x_BTd.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tokens", [1, 2 * D])
def test_a_head_without_logits_overflows_no_sooner_than_one_with_them(way, keep, tokens) -> None:
    """The gradient of the only token's loss is the scale, which is infinite in float16."""
    found, excluded = [], []
    for with_logits in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 9, bias=False))
        with torch.no_grad():
            model[0].weight.mul_(8)
        clipping = way(model, BOUND, loss_scale=SCALE)
        x, labels = torch.randn(B, tokens, D), torch.zeros(B, tokens, dtype=torch.int64)
        with torch.autocast("cpu", torch.float16):
            if with_logits:
                logits = model(x).float().transpose(1, 2)
                losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            else:
                losses = linear_cross_entropy(model[0](x), model[1], labels, keep=keep)
        clipping.backward(losses.mean(1))
        excluded.append(clipping.nonfinite_samples)
        found.append(gradients(model))

    assert excluded[0] == excluded[1] < B
    assert (found[0] - found[1]).norm() < 16 * torch.finfo(torch.float16).eps * found[0].norm()
