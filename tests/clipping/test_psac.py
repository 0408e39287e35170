"""Per-sample adaptive clipping: a sample contributes C norm / (norm + r / (norm + r))."""

import math

import pytest
import torch
from one_call import Model, prepare, train, weights
from small_models import batch, build, gradients, one_by_one, private
from torch import nn

from dpprof.private import BookKeeping, check
from dpprof.private.engine.factor import clip_factor, find_least_norm

C, R = 0.8, 0.1


def factor(norm: float) -> float:
    return C / (norm + R / (norm + R))


def test_it_is_that_of_single_samples(way) -> None:
    model, samples = build().double(), batch()
    expected = torch.zeros((), dtype=torch.float64)
    for sample in zip(*samples, strict=True):
        alone = [part[None] for part in sample]
        _, gradient, _ = one_by_one(model.losses, model, alone, math.inf)
        expected = expected + gradient * factor(float(gradient.norm()))
    clipping = way(model, C, stability=R, psac=True)
    clipping.backward(model.losses(*samples))

    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", [1e-9, 1e-3, 0.2, 1.0, 1e3, 1e9])
def test_every_length_contributes_less_than_the_bound(way, norm) -> None:
    model = nn.Linear(4, 1, bias=False).double()
    clipping = way(model, C, stability=R, psac=True)
    clipping.backward(model(torch.full((1, 4), norm / 2, dtype=torch.float64))[:, 0])

    contributed = float(gradients(model).norm())
    assert contributed == pytest.approx(norm * factor(norm), rel=1e-9)
    assert contributed <= C * (1 + 1e-12)


@pytest.mark.parametrize("stability", [1e-4, R, 0.9, 1.0, 7.0])
def test_the_least_norm_is_that_of_the_largest_factor(stability) -> None:
    norms = torch.logspace(-8, 4, 200_000, dtype=torch.float64)
    largest = clip_factor(norms, C, stability, psac=True).max()

    least = find_least_norm(C, stability, psac=True)
    assert float(largest) == pytest.approx(C / least, rel=1e-4)


def test_check_knows_it() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    loss = lambda model, x: model(x).square().sum(1)  # noqa: E731
    clipping = BookKeeping(model, C, stability=R, psac=True)
    assert check(model, loss, (torch.randn(4, 5).double(),), clipping).max_relative_error < 1e-9


def test_make_private_takes_it_by_name() -> None:
    model, flat = Model().double(), Model().double()
    told = prepare(model, clipping="psac")
    assert (told.optimizer.clipping.stability, told.optimizer.clipping.is_psac) == (0.1, True)
    train(told, model)
    train(prepare(flat), flat)

    assert not torch.allclose(weights(model), weights(flat))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stability": None}, "psac clipping needs a stability, its r, such as 0.1"),
        ({"stability": 1e-9}, "stability must be finite and at least 0.000976562"),
        ({"stability": -0.1}, "and is -0.1"),
        ({"stability": 5.0}, None),
    ],
)
def test_what_cannot_be_bounded_is_refused(options, said) -> None:
    model = nn.Linear(3, 2)
    if said is None:
        BookKeeping(model, C, psac=True, **options)
        return
    with pytest.raises(ValueError, match=said):
        BookKeeping(model, C, psac=True, **options)


def test_a_state_of_another_clipping_is_refused() -> None:
    models = nn.Linear(3, 2), nn.Linear(3, 2)
    made = [
        private(BookKeeping(model, C, stability=R, psac=psac), model)
        for model, psac in zip(models, (False, True), strict=True)
    ]
    for ours, others in (made, made[::-1]):
        with pytest.raises(ValueError, match=r"was made with stability .*0\.1 of psac"):
            ours.load_state_dict(others.state_dict())
