"""A sample that is not finite adds nothing, and the others keep what they add to the bit."""

import math

import pytest
import torch
from small_models import EVERY, FLAT, Scale, private
from torch import nn

from dpprof.clipping.per_layer import PerLayerClipping

BAD = [math.nan, math.inf, -math.inf, 1e30]
"""The last is finite; its gradient's square is not, in float32."""


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.LayerNorm(8), Scale(8), nn.Linear(8, 7), nn.RMSNorm(7)]
    return nn.Sequential(*layers, nn.Linear(7, 3, bias=False)).to(dtype)


def inputs(B: int = 4, T: int = 6) -> torch.Tensor:
    return torch.randn(B, T, 5, generator=torch.Generator().manual_seed(1))


def clip(way, x_BTd, *, bound: float = 0.1, loss_at=None) -> tuple:
    model = build()
    clipping = way(model, bound)
    losses_B = model(x_BTd).tanh().sum((1, 2))
    if loss_at is not None:
        at, value = loss_at
        weights_B = torch.ones(len(losses_B)).index_fill_(0, torch.tensor(at), value)
        losses_B = losses_B * weights_B
    clipping.backward(losses_B)
    return clipping, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("value", BAD)
def test_a_sample_that_is_not_finite_adds_nothing_and_costs_the_others_nothing(value, way) -> None:
    x = inputs()
    silent = torch.zeros(4).index_fill_(0, torch.tensor([1, 2, 3]), 1.0)
    model = build()
    clipping = way(model, 0.1)
    clipping.backward(model(x).tanh().sum((1, 2)) * silent)  # the first has a gradient of zero
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (clipping.nonfinite_samples, clipping.nonfinite_samples_total) == (0, 0)
    x[0, 2] = value

    clipping, found = clip(way, x)

    if value == 1e30:  # layer norms make ordinary numbers of it, so only the first layer overflows
        assert way is PerLayerClipping or clipping.nonfinite_samples == 1
    assert clipping.nonfinite_samples == clipping.nonfinite_samples_total == 1
    assert found.isfinite().all()
    if not (value == 1e30 and way is PerLayerClipping):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_so_does_a_loss_that_is_not_finite(value, way) -> None:
    clipping, found = clip(way, inputs(), loss_at=(2, value))
    _, expected = clip(way, inputs(), loss_at=(2, 0.0))

    assert clipping.nonfinite_samples == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", EVERY)
def test_where_no_sample_is_finite_there_is_noise_alone(way) -> None:
    model = build()
    clipping = way(model, 0.1)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    clipping.backward(model(inputs() * math.nan).sum((1, 2)))
    assert clipping.nonfinite_samples == 4
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    optimizer.zero_grad()
    clipping.backward(model(inputs()).sum((1, 2)))

    assert clipping.nonfinite_samples == 0
    assert clipping.nonfinite_samples_total == 4


@pytest.mark.parametrize("way", FLAT)
def test_a_table_and_shared_weights_leave_it_out_too(way) -> None:
    torch.manual_seed(0)

    def run(row: float) -> tuple:
        table = nn.Embedding(6, 4)
        head = nn.Linear(4, 6, bias=False)
        head.weight = table.weight
        with torch.no_grad():
            table.weight.copy_(torch.arange(24.0).view(6, 4) / 10)
        model = nn.Sequential(table, head)
        clipping = way(model, 0.5)
        weights = torch.tensor([row, 1.0, 1.0])
        ids = torch.tensor([[0, 1], [2, 3], [3, 3]])
        clipping.backward((model(ids).square().sum((1, 2))) * weights)
        return clipping, table.weight.grad

    clipping, found = run(math.nan)
    _, expected = run(0.0)
    assert clipping.nonfinite_samples == 1
    assert torch.equal(found, expected)
