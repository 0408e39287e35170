"""Losses that draw numbers are checked with their own draws; wrong ones among them are found."""

import random

import numpy as np
import pytest
import torch
from private_loops import (
    WAYS,
    ByHand,
    build_mlp,
    check_by_hand,
    noisy_loss,
    points_loss,
    with_hooks,
)
from products import one_in
from torch import nn
from torch.distributions import Beta, Normal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, FlashClipping, WrongTrainingError

D = 6
OWN, OF_NUMPY, OF_PYTHON = (
    torch.Generator().manual_seed(3),
    np.random.default_rng(0),
    random.Random(0),  # noqa: S311 (as users draw)
)
COPIES = "each sample's loss is the same among copies of the sample"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D))


def draw() -> torch.Tensor:
    return torch.randn(5, D, generator=torch.Generator().manual_seed(1))


def error(model, x, target):
    return (model(x) - target).square().flatten(1).mean(1)


def diffusion(model, x):
    kept = torch.rand(10)[torch.randint(0, 10, (len(x),))][:, None]
    noise = torch.randn_like(x)
    return error(model, kept * x + (1 - kept) * noise, noise)


def vae(model, x):
    mean, spread = model(x).chunk(2, 1)
    return (Normal(mean, spread.exp()).rsample() - x[:, :3]).square().mean(1)


def gan(model, x):
    fake = torch.randn(len(x), D, generator=OWN).cos()
    return functional.softplus(-model(x)[:, 0]) + functional.softplus(model(fake)[:, 0])


def label_noise(model, x):
    wrong = torch.rand(len(x)) < 0.5
    labels = torch.where(wrong, torch.randint(D, (len(x),)), x.argmax(1))
    return functional.cross_entropy(model(x), labels, reduction="none")


def checkpointed(model, x):
    part = lambda x: model(x + torch.randn_like(x))  # noqa: E731
    return error(lambda x: checkpoint(part, x, use_reentrant=False), x, x)


def several(model, x):
    return torch.stack([error(model, x + torch.randn_like(x), x) for _ in range(3)]).mean(0)


def attend(model, x):
    h = model(x)[:, None, :, None]
    attended = functional.scaled_dot_product_attention(h, h, h, dropout_p=0.3)
    return (attended[:, 0, :, 0] - x).square().mean(1)


def augment_each(model, x):
    own = [one * torch.rand(()) + torch.randn(D) for one in x]
    return error(model, torch.stack(own) if own else x, x)


OWN_ROWS = {
    "dropout in attention": attend,
    "a loop over samples": augment_each,
    "columns that are left out": lambda m, x: error(
        m, x.index_fill(1, torch.randperm(D)[:2], 0.0), x
    ),
    "diffusion": diffusion,
    "a variational autoencoder": vae,
    "a GAN": gan,
    "noise in labels": label_noise,
    "noise under checkpointing": checkpointed,
    "several draws": several,
    "an extra axis": lambda m, x: error(m, x[:, None] + torch.randn(len(x), 4, D), x[:, None]),
    "another axis first": lambda m, x: error(m, x + torch.randn(D, len(x)).T, x),
    "one number for all": lambda m, x: error(m, x * torch.rand(()), x),
    "a drawn number of draws": lambda m, x: error(
        m, x + sum(torch.randn_like(x) for _ in range(int(torch.randint(1, 4, ())))), x
    ),
    "dropout by function": lambda m, x: error(m, functional.dropout(x, 0.3), x),
    "counts that follow from the sample": lambda m, x: error(m, x, torch.poisson(x.exp())),
    "one number of NumPy": lambda m, x: error(m, x * OF_NUMPY.uniform(), x),
    "one number of Python": lambda m, x: error(m, x * OF_PYTHON.random(), x),
}


@pytest.mark.parametrize(("kind", "way"), one_in(2, OWN_ROWS, [BookKeeping, FlashClipping]))
def test_losses_that_draw_pass(kind, way) -> None:
    model = build()
    clipping = way(model, 0.3)
    found = clipping.check(lambda x: OWN_ROWS[kind](model, x), draw())

    assert "each sample's loss is its own" in found.checked
    assert "the gradient is that of single samples, clipped" in found.checked
    assert set(found.unchecked) == {"optimizer", "noise", "padding"}
    assert found.max_relative_error < 1e-4


def of_some(model, x):
    """Draw as many numbers as there are positive ones in the whole batch."""
    is_filled = x > 0
    noisy = x.clone()
    noisy[is_filled] = torch.randn(int(is_filled.sum()))
    return error(model, noisy, x)


def rows_of_numpy(model, x):
    return error(model, x + torch.from_numpy(np.random.randn(*x.shape)).float(), x)  # noqa: NPY002


def permuted(model, x):
    return error(model, x + torch.randn(len(x), D)[torch.randperm(len(x))], x)


def places_of_all(model, x):
    places = torch.randperm(x.numel())[:8]
    return error(model, x.flatten().index_fill(0, places, 0.0).view_as(x), x)


@pytest.mark.parametrize("kind", [of_some, rows_of_numpy, permuted, places_of_all])
def test_draws_that_are_not_one_samples_are_told(kind) -> None:
    model = build()
    found = BookKeeping(model, 0.3).check(lambda x: kind(model, x), draw())

    assert "the loss draws numbers" in found.unchecked["each sample alone"]
    assert "the loss's scale is not checked" in found.unchecked["each sample alone"]
    assert (COPIES in found.checked) == (kind is not of_some)
    assert ("nor that it" in found.unchecked["each sample alone"]) == (kind is of_some)
    assert "the gradient is that of single samples, clipped" in found.checked


def test_rows_that_cannot_be_told_need_a_loss_for_each_sample() -> None:
    setup = with_hooks(build(), lambda *batch: rows_of_numpy(*batch).mean())
    with pytest.raises(ValueError, match=r"NumPy or Python.*return one loss for each sample"):
        setup.check((draw(),))


def mixup(model, x):
    share = Beta(8.0, 8.0).sample()
    return error(model, share * x + (1 - share) * x[torch.randperm(len(x))], x)


def mixup_of_numpy(model, x):
    return error(model, 0.5 * x + 0.5 * x[OF_NUMPY.permutation(len(x))], x)


def rolled(model, x):
    return error(model, 0.5 * x + 0.5 * x.roll(OF_PYTHON.randrange(1, len(x) + 1), 0), x)


def contrasted(model, x):
    h = model(x + 0.1 * torch.randn_like(x))
    return functional.cross_entropy(h @ h.T, torch.arange(len(x)), reduction="none")


def negatives(model, x):
    return error(model, x, x[torch.randint(len(x), (len(x),))])


def drawn_from_others(model, x):
    return error(model, x, torch.poisson((x - x.mean(0)).exp()))


def weighed(model, x):
    losses = diffusion(model, x)
    return losses / losses.detach().mean()


WRONG = {
    "weighed by a detached mean": weighed,
    "mixup": mixup,
    "mixup of NumPy": mixup_of_numpy,
    "rolled": rolled,
    "contrasted": contrasted,
    "negatives of the batch": negatives,
    "draws that follow from other samples": drawn_from_others,
    "centred": lambda m, x: error(m, x - x.mean(0) + torch.randn_like(x), x),
    "centred, with NumPy": lambda m, x: rows_of_numpy(m, x - x.mean(0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_losses_that_draw_and_mix_samples_are_found(wrong) -> None:
    model = build()
    torch.manual_seed(1)
    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        BookKeeping(model, 0.3).check(lambda x: WRONG[wrong](model, x), draw())


def test_noise_that_is_drawn_again_in_backward_is_found() -> None:
    model = build()
    part = lambda x: model(x + torch.randn_like(x))  # noqa: E731
    again = {"use_reentrant": False, "preserve_rng_state": False}
    with pytest.raises(WrongTrainingError, match="preserve_rng_state=True"):
        BookKeeping(model, 0.3).check(
            lambda x: error(lambda x: checkpoint(part, x, **again), x, x), draw()
        )


@pytest.mark.parametrize("way", WAYS)
def test_loops_of_every_way_pass_and_a_wrong_scale_is_found(way) -> None:
    found = WAYS[way](build_mlp(), noisy_loss).check()

    assert found.max_relative_error < 1e-4
    assert {"each sample's loss is its own", "so it is with dropout on"} <= set(found.checked)
    assert any(one.startswith("noise of the right scale") for one in found.checked)

    with pytest.raises(WrongTrainingError, match=r"1/4 of its loss alone: the mean .* taken twice"):
        WAYS[way](build_mlp(), lambda m, x, y: noisy_loss(m, x, y) / len(x)).check()


def test_the_mean_of_losses_that_draw_passes_and_a_sum_is_found() -> None:
    of_mean = WAYS["opacus hooks"](build_mlp(), lambda *batch: noisy_loss(*batch).mean())
    assert of_mean.check().max_relative_error < 1e-2
    setup = WAYS["flash-bk"](build_mlp(), lambda m, x, y: len(x) * noisy_loss(m, x, y))
    with pytest.raises(WrongTrainingError, match="4 times its loss alone: it depends on the size"):
        setup.check()


def test_loops_by_hand_may_draw_sample_by_sample() -> None:
    for model in (build_mlp(), nn.Linear(5, 3)):  # whose noise has the shape of samples
        found = check_by_hand(model, noisy_loss)
        assert found.max_relative_error < 1e-4
        assert "an empty batch contributes nothing" in found.checked


def test_loops_by_hand_that_draw_in_another_order_are_refused() -> None:
    def several_at_once(model, x, y):
        drawn_NB = torch.randn(3 * len(x), 5).view(3, len(x), 5)
        return torch.stack([points_loss(model, x + drawn, y) for drawn in drawn_NB]).mean(0)

    with pytest.raises(ValueError, match="draws the numbers of its losses in another order"):
        check_by_hand(build_mlp(), several_at_once)

    def loss(model, x, y):
        return points_loss(model, x * np.random.rand(), y)  # noqa: NPY002

    loop = ByHand(build_mlp(), loss)
    with pytest.raises(ValueError, match="draws numbers with NumPy or Python, so a step by hand"):
        check_by_hand(loop.model, loss)


def test_all_generators_are_left_as_they_were() -> None:
    model = build()

    def losses_of(x):
        shift = OF_NUMPY.normal() + OF_PYTHON.random()
        shift += random.random() + np.random.rand()  # noqa: NPY002, S311 (as users draw)
        return error(model, x + shift + torch.randn(x.shape, generator=OWN), x + torch.rand_like(x))

    def states():
        own = (OWN.get_state(), torch.get_rng_state())
        others = (OF_PYTHON, random)
        return (
            *(one.tolist() for one in own),
            *(one.getstate() for one in others),
            OF_NUMPY.bit_generator.state,
            str(np.random.get_state()),  # noqa: NPY002 (its words change at every 312th draw alone)
        )

    clipping, before = BookKeeping(model, 0.3), states()
    clipping.check(losses_of, draw())
    assert states() == before
    losses_of(draw())
    assert all(now != then for now, then in zip(states(), before, strict=True))
