"""A batch normalisation that is frozen and in ``eval()`` mixes nothing; any other is refused."""

import copy

import pytest
import torch
from small_models import FLAT, assert_exact
from torch import nn

from dpprof.private import BookKeeping, PerLayerClipping
from dpprof.private.errors import UnsupportedError


def build(**options) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, **options).requires_grad_(requires_grad=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    model.double()(torch.randn(8, 3, 6, 6, dtype=torch.float64))  # has statistics then
    norm.eval()
    return model


IMAGES = torch.randn(5, 3, 6, 6, dtype=torch.float64)


def losses_of(model):
    return lambda images: model(images).square().sum(1)


@pytest.mark.parametrize("way", FLAT)
def test_samples_are_exact_through_a_frozen_norm(way) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    assert_exact(way, model, (IMAGES,), losses_of(model), bound=0.5, tolerance=1e-9)

    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "1.weight"):
        assert torch.equal(model.state_dict()[name], before[name])


def test_it_counts_as_no_layer() -> None:
    assert PerLayerClipping(build(), 1.0).bound == pytest.approx(1 / 2**0.5)


def test_training_mode_is_refused_whenever_it_comes() -> None:
    model = build()
    clipping = BookKeeping(model, 0.5)
    clipping.backward(losses_of(model)(IMAGES))
    model.zero_grad()
    model.train()

    with pytest.raises(UnsupportedError, match=r"BatchNorm2d mixes samples.*call eval\(\)"):
        model(IMAGES)
    copy.deepcopy(model)(IMAGES)  # a copy is a plain model
    model[1].eval()
    clipping.backward(losses_of(model)(IMAGES))
    clipping.remove()
    model.train()
    model(IMAGES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda norm: norm.train(), "mixes samples; use GroupNorm"),
        (lambda norm: norm.requires_grad_(requires_grad=True), "mixes samples; use GroupNorm"),
    ],
)
def test_what_is_not_frozen_is_refused(change, message) -> None:
    model = build()
    change(model[1])

    with pytest.raises(UnsupportedError, match=message):
        BookKeeping(model, 0.5)


def test_a_norm_without_statistics_mixes_in_any_mode() -> None:
    with pytest.raises(UnsupportedError, match="keeps no statistics"):
        BookKeeping(build(track_running_stats=False), 0.5)


def test_one_that_is_thawed_is_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 0.5)
    model[1].requires_grad_(requires_grad=True)

    with pytest.raises((RuntimeError, UnsupportedError), match="mixes samples"):
        clipping.backward(losses_of(model)(IMAGES))
