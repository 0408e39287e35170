"""A sample that is not finite adds nothing, and the others keep what they add to the bit."""

import math
from contextlib import nullcontext

import pytest
import small_models
import torch
from small_models import EVERY, NORMALISED, Scale, batch, each_of, gradients, private, sums_of
from torch import nn

from dpprof.private import PerLayerClipping
from dpprof.private.norms import linear, triton_ops
from dpprof.private.norms.placement import as_if_on_cuda

way = each_of(EVERY)

BAD = [math.nan, math.inf, -math.inf, 1e30]
"""The last is finite; its gradient's square is not, in float32."""


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.LayerNorm(8), Scale(8), nn.Linear(8, 7), nn.RMSNorm(7)]
    return nn.Sequential(*layers, nn.Linear(7, 3, bias=False))


def inputs(B: int = 4, T: int = 6) -> torch.Tensor:
    return torch.randn(B, T, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("place", [nullcontext, as_if_on_cuda])
@pytest.mark.parametrize("way", [*EVERY, *NORMALISED])
@pytest.mark.parametrize("value", BAD)
def test_a_sample_that_is_not_finite_adds_nothing_and_costs_the_others_nothing(
    value, way, place, monkeypatch
) -> None:
    for module in (linear, triton_ops):  # as on a GPU without Triton
        monkeypatch.setattr(module, "is_fused", lambda _: False)
    x = inputs()
    silent = torch.zeros(4).index_fill_(0, torch.tensor([1, 2, 3]), 1.0)
    model = build()
    clipping = way(model, 0.1)
    with place():
        clipping.backward(model(x).tanh().sum((1, 2)) * silent)  # the first has a gradient of zero
    expected = gradients(model)
    assert (clipping.nonfinite_samples, clipping.nonfinite_samples_total) == (0, 0)
    x[0, 2] = value

    model = build()
    clipping = way(model, 0.1)
    with place():
        clipping.backward(model(x).tanh().sum((1, 2)))
    found = gradients(model)

    if value == 1e30:  # layer norms make ordinary numbers of it, so only the first layer overflows
        assert way is PerLayerClipping or clipping.nonfinite_samples == 1
    assert clipping.nonfinite_samples == clipping.nonfinite_samples_total == 1
    assert found.isfinite().all()
    if not (value == 1e30 and way is PerLayerClipping):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["layer norm", "tied"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_so_does_a_loss_that_is_not_finite(value, way, kind) -> None:
    if kind == "tied" and way is PerLayerClipping:
        pytest.skip("it refuses shared weights")

    def clip(weight):
        model, (ids, labels, weights) = small_models.build(kind, bias=False), batch()
        weights[2] = weight
        clipping = way(model, 0.1)
        clipping.backward(model.losses(ids, labels, weights))
        return clipping.nonfinite_samples, gradients(model)

    count, found = clip(value)
    assert count == 1
    assert torch.equal(found, clip(0.0)[1])


def test_where_no_sample_is_finite_there_is_noise_alone(way) -> None:
    model = build()
    clipping = way(model, 0.1)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    clipping.backward(model(inputs() * math.nan).sum((1, 2)))
    assert clipping.nonfinite_samples == 4
    assert not sums_of(clipping).any()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    optimizer.zero_grad()
    clipping.backward(model(inputs()).sum((1, 2)))

    assert clipping.nonfinite_samples == 0
    assert clipping.nonfinite_samples_total == 4
