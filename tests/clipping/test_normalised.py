"""Normalised clipping: every sample contributes C norm / (norm + gamma), which is less than C.

With per-sample adaptive clipping gamma is r / (norm + r).
"""

import math

import pytest
import torch
from one_call import Model, prepare, train, weights
from small_models import KINDS, batch, build, gradients, one_by_one, private
from snapshots import assert_sentences, refusals_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, FlashClipping, PerLayerClipping, UnsupportedError, check
from dpprof.private.engine.factor import LEAST_STABILITY, clip_factor, find_least_norm

C, GAMMA, R = 0.8, 0.05, 0.1
PSAC = {"stability": R, "psac": True}
FACTORS = [
    ({"stability": GAMMA}, lambda norm: C / (norm + GAMMA)),
    (PSAC, lambda norm: C / (norm + R / (norm + R))),
]


def normalised(model: nn.Module, samples, losses_of, factor=FACTORS[0][1]):
    """Sum each sample's gradient times a factor of its norm, by ordinary autograd."""
    total = torch.zeros(())
    for sample in zip(*samples, strict=True):
        _, gradient, _ = one_by_one(losses_of, model, [part[None] for part in sample], math.inf)
        total = total + gradient * factor(gradient.norm())
    return total


@pytest.mark.parametrize(("options", "factor"), FACTORS, ids=["normalised", "psac"])
@pytest.mark.parametrize(("kind", "bias"), KINDS[::3])
def test_it_is_that_of_single_samples(way, kind, bias, options, factor) -> None:
    model = build(kind, bias=bias)
    expected = normalised(model, batch(), model.losses, factor)
    clipping = way(model, C, **options)
    clipping.backward(model.losses(*batch()))

    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)
    assert clipping.sample_norms[-1] == 0  # and contributes zero


def test_a_batch_in_parts_is_the_whole_one(way) -> None:
    ids, labels, weights = batch(6)
    model = build()
    expected = normalised(model, (ids, labels, weights), model.losses)
    clipping = way(model, C, stability=GAMMA)
    optimizer = private(clipping, model, lr=0.0)
    for at in (0, 2, 4):
        part = slice(at, at + 2)
        optimizer.signal_skip_step(at < 4)
        clipping.backward(model.losses(ids[part], labels[part], weights[part]))
        optimizer.step()
        if at < 4:
            optimizer.zero_grad()

    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def squares(model: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    return scale * model(x).sum((1, 2))


SCALES = [0.0, *(10.0**power for power in (-40, -30, -20, -12, -6, -3, 0, 3, 6, 12, 18, 30, 38))]


@pytest.mark.parametrize("gamma", [LEAST_STABILITY, 1.0])
@pytest.mark.parametrize("where", ["inputs", "losses", "both ways"])
def test_samples_of_any_size_contribute_less_than_the_bound(way, gamma, where) -> None:
    """Squares overflow and underflow; ways to norms with the Gram matrix, kept and direct."""
    for scale in SCALES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 3), nn.PReLU())
        clipping = way(model, C, stability=gamma)
        x, by = torch.randn(2, 6, 96), torch.ones(2)
        if where != "losses":
            x[0] *= scale
        if where != "inputs":
            by[0] *= scale if where == "losses" else 1 / max(scale, 1e-38)
        by[1] = 0  # the other sample contributes nothing
        clipping.backward(squares(model, x, by))
        moved = gradients(model).norm()

        assert moved <= C * (1 + 2**-8)
        if clipping.nonfinite_samples:
            assert moved == 0


@pytest.mark.parametrize(("options", "factor"), FACTORS, ids=["normalised", "psac"])
def test_long_gradients_reach_the_bound_and_none_exceeds_it(way, options, factor) -> None:
    model = nn.Linear(4, 1, bias=False).double()
    for norm in (1e-9, 1e-3, 0.05, 0.2, 1.0, 3.0, 1e9):
        model.zero_grad()
        clipping = way(model, C, **options)
        clipping.backward(model(torch.full((1, 4), norm / 2, dtype=torch.float64))[:, 0])
        clipping.remove()
        contributed = float(gradients(model).norm())
        assert contributed == pytest.approx(norm * factor(norm), rel=1e-9)
        assert contributed <= C * (1 + 1e-12)


@pytest.mark.parametrize("stability", [1e-4, R, 0.9, 1.0, 7.0])
def test_the_least_norm_is_that_of_the_largest_factor(stability) -> None:
    norms = torch.logspace(-8, 4, 200_000, dtype=torch.float64)
    largest = clip_factor(norms, C, stability, psac=True).max()

    least = find_least_norm(C, stability, psac=True)
    assert float(largest) == pytest.approx(C / least, rel=1e-4)


def test_make_private_takes_psac_by_name() -> None:
    model, flat = Model().double(), Model().double()
    told = prepare(model, clipping="psac")
    assert (told.optimizer.clipping.stability, told.optimizer.clipping.is_psac) == (0.1, True)
    train(told, model)
    train(prepare(flat), flat)

    assert not torch.allclose(weights(model), weights(flat))


def test_noise_is_that_of_flat_clipping(way) -> None:
    model = nn.Linear(100, 200, bias=False)
    clipping = way(model, C, stability=GAMMA)
    optimizer = private(clipping, model, noise_multiplier=2.0)
    clipping.backward(torch.zeros(0))
    optimizer.step()

    assert float(gradients(model).std()) == pytest.approx(2 * C, rel=0.03)


def test_passes_that_differ_are_refused_however_short_the_gradients_are() -> None:
    """Flat clipping would add them as they are, far below C; here they are made longer."""
    first, last = nn.Linear(5, 8), nn.Linear(8, 3)

    def losses_of(x: Tensor) -> Tensor:
        hidden = checkpoint(
            lambda x: functional.dropout(last(first(x)), 0.5),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return 1e-3 * hidden.square().sum(1)

    model = nn.ModuleList([first, last])
    clipping = FlashClipping(model, 1e6, stability=GAMMA, first_batch="trusted")
    with pytest.raises(RuntimeError, match="was summed than measured"):
        clipping.backward(losses_of(torch.randn(8, 5)))


@pytest.mark.parametrize("options", [{"stability": GAMMA}, PSAC])
def test_check_knows_it(options) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    loss = lambda model, x: model(x).square().sum(1)  # noqa: E731
    clipping = BookKeeping(model, C, **options)
    assert check(model, loss, (torch.randn(4, 5).double(),), clipping).max_relative_error < 1e-9


def test_what_cannot_be_bounded_is_refused() -> None:
    ways = {one.__name__: one for one in (BookKeeping, FlashClipping, PerLayerClipping)}

    def clip(way, bound, **options) -> None:
        model = nn.Linear(3, 2)
        try:
            ways[way](model, bound, **options)
        finally:
            clipping = BookKeeping(model, C, stability=0.01)  # nothing was left behind
            with pytest.raises(ValueError, match=r"at least 0\.909"):
                clipping.max_grad_norm = 1e12
            assert clipping.max_grad_norm == C

    assert_sentences("clipping/normalised", refusals_of(clip))


def test_float16_is_refused(way) -> None:
    model = nn.Linear(5, 3)
    for dtype in (torch.bfloat16, torch.float16):
        clipping = way(model, C, stability=GAMMA)
        with torch.autocast("cpu", dtype):
            losses = model(torch.ones(2, 5)).float().sum(1)
        if dtype is torch.bfloat16:
            clipping.backward(losses)
            clipping.remove()
            model.zero_grad()
            continue
        with pytest.raises(UnsupportedError, match="for which float16 has too small a range"):
            clipping.backward(losses)


@pytest.mark.parametrize(
    ("own", "others", "told"),
    [
        ({"stability": 0.01}, {}, r"made with stability None, and this one with 0\.01"),
        (PSAC, {"stability": R}, r"was made with stability .*0\.1 of psac"),
        ({"stability": R}, PSAC, r"was made with stability .*0\.1 of psac"),
    ],
)
def test_a_state_of_another_clipping_is_refused(own, others, told) -> None:
    first, other = nn.Linear(3, 2), nn.Linear(3, 2)
    state = private(BookKeeping(first, C, **others), first).state_dict()
    with pytest.raises(ValueError, match=told):
        private(BookKeeping(other, C, **own), other).load_state_dict(state)
