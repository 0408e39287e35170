"""``check`` of losses that draw numbers: right ones pass, wrong ones are found, states stay.

Shape legend: B samples, N draws of a sample.
"""

import random

import numpy as np
import pytest
import torch
from private_loops import WAYS, B, ByHand, build_mlp, check_by_hand, points, with_dpprof
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, WrongTrainingError, check

OWN = torch.Generator().manual_seed(3)


def denoise(model, x, y):
    return (model(x + torch.randn_like(x)) - y).square().mean(1)


def diffuse(model, x, y):
    share = torch.randint(1, 10, (len(x),))[:, None] / 10
    return (model(share * x + (1 - share) * torch.randn_like(x)) - y).square().mean(1)


def encode(model, x, y):
    mean, scale = model(x)[:, :1], model(x)[:, 1:2].exp()
    drawn = torch.distributions.Normal(mean, scale).rsample()
    return (drawn - y).square().mean(1) + mean[:, 0].square()


def generate(model, x, y):
    return functional.softplus(model(torch.randn(len(x), 5))[:, 0]) + 0 * y[:, 0]


def flip_labels(model, x, y):
    drawn = torch.randint(3, (len(x),))
    labels = torch.where(torch.rand(len(x)) < 0.5, drawn, y.argmax(1))
    return functional.cross_entropy(model(x), labels, reduction="none")


def flip_all(model, x, y):
    return (model(x.flip(1) if torch.rand(()) < 0.5 else x) - y).square().mean(1)


def mix_with_nothing(model, x, y):
    share = torch.distributions.Beta(0.3, 0.3).sample((len(x), 1))
    return (model(share * x) - y).square().mean(1)


def drop(model, x, y):
    return (model(functional.dropout(x, 0.5)) - y).square().mean(1)


def drop_columns(model, x, y):
    return (model(x.index_fill(1, torch.randperm(5)[:2], 0.0)) - y).square().mean(1)


def augment_each(model, x, y):
    x = torch.stack([one * torch.rand(()) + torch.randn(5) for one in x]) if len(x) else x
    return (model(x) - y).square().mean(1)


def sample_labels(model, x, y):
    logits = model(x)
    labels = torch.distributions.Categorical(logits=logits.detach()).sample()
    return functional.cross_entropy(logits, labels, reduction="none") + 0 * y[:, 0]


def draw_by_own_generator(model, x, y):
    return (model(x + torch.randn(x.shape, generator=OWN)) - y).square().mean(1)


def draw_by_python(model, x, y):
    return (model(random.random() * x) - y).square().mean(1)  # noqa: S311


def attend(model, x, y):
    h = model(x)[:, None, :, None]
    found = functional.scaled_dot_product_attention(h, h, h, dropout_p=0.3)[:, 0, :, 0]
    return (found - y).square().mean(1)


RIGHT = [
    *(denoise, diffuse, encode, generate, flip_labels, flip_all, mix_with_nothing, drop),
    *(drop_columns, augment_each, sample_labels, draw_by_own_generator, draw_by_python, attend),
]
TWICE = (encode,)
"""What Opacus refuses, because they run a model twice."""

QUICK = {(denoise, way) for way in WAYS} | {(loss, "flash-bk") for loss in RIGHT}


def states():
    numbers = torch.get_rng_state().tolist(), OWN.get_state().tolist()
    return *numbers, random.getstate(), str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize(
    ("loss", "way"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in ((loss, way) for loss in RIGHT for way in WAYS)
        if case[0] not in TWICE or "opacus" not in case[1]
    ],
)
def test_right_losses_that_draw_pass_and_draw_on_as_before(loss, way) -> None:
    setup = WAYS[way](build_mlp(), loss)
    before = states()
    found = setup.check()

    assert states() == before
    assert found.max_relative_error < 1e-2
    assert "each sample alone" not in found.unchecked
    assert any(one.startswith("noise of the right scale") for one in found.checked)
    assert "so it is with dropout on" in found.checked


@pytest.mark.parametrize("loss", [denoise, diffuse, flip_labels, augment_each, flip_all])
def test_the_mean_of_losses_that_draw_passes(loss) -> None:
    found = WAYS["opacus hooks"](build_mlp(), lambda *batch: loss(*batch).mean()).check()
    assert found.max_relative_error < 1e-2


@pytest.mark.parametrize("loss", [*RIGHT[:8], augment_each, sample_labels])
def test_a_loop_of_single_samples_draws_for_one_after_the_other(loss) -> None:
    assert check_by_hand(build_mlp(), loss).max_relative_error < 1e-4


@pytest.mark.parametrize("wrong", ["clips the sum", "bound", "no noise", "seed", "divided twice"])
def test_wrong_loops_of_losses_that_draw_are_found(wrong) -> None:
    model = build_mlp()
    loop = ByHand(model, denoise, wrong)
    message = {"no noise": "gets no noise", "seed": "the same noise in every step"}
    with pytest.raises(WrongTrainingError, match=message.get(wrong, "clipped|divided twice")):
        check(model, denoise, points(), loop.mechanism, step=loop.step)


def by_numpy(model, x, y):
    drawn = np.random.randn(*x.shape)  # noqa: NPY002 (users draw so)
    return (model(x + torch.from_numpy(drawn).float()) - y).square().mean(1)


def several_in_another_order(model, x, y):
    drawn_NB = torch.randn(3 * len(x), 5).view(3, len(x), 5)
    losses = [(model(x + drawn) - y).square().mean(1) for drawn in drawn_NB]
    return torch.stack(losses).mean(0)


def first_of_many(model, x, y):
    return (model(x + torch.randn(B, 5)[: len(x)]) - y).square().mean(1)


def masked(model, x, y):
    where = x > 0
    return (model(x.masked_scatter(where, torch.rand(int(where.sum())))) - y).square().mean(1)


@pytest.mark.parametrize("loss", [by_numpy, several_in_another_order, first_of_many, masked])
def test_what_cannot_be_drawn_for_a_sample_alone_is_told(loss) -> None:
    found = with_dpprof(BookKeeping, build_mlp(), loss).check()
    assert "not those of one sample" in found.unchecked["each sample alone"]
    assert ("nor that it keeps samples" in found.unchecked["each sample alone"]) == (loss is masked)
    assert found.max_relative_error < 1e-2


def test_one_number_whose_draws_cannot_be_told_is_refused() -> None:
    setup = WAYS["opacus hooks"](build_mlp(), lambda *batch: by_numpy(*batch).mean())
    with pytest.raises(ValueError, match="not those of one sample; let loss return one"):
        setup.check()


def test_a_step_by_hand_whose_order_of_draws_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="draws the numbers of its losses in another order"):
        check_by_hand(build_mlp(), several_in_another_order)


def mix(model, x, y):
    share = torch.rand(())
    order = torch.randperm(len(x))
    return (model(share * x + (1 - share) * x[order]) - y).square().mean(1)


def contrast(model, x, y):
    z = model(x + 0.1 * torch.randn_like(x))
    return functional.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none") + 0 * y[:, 0]


def center(model, x, y):
    return denoise(model, x - x.mean(0), y)


def center_by_numpy(model, x, y):
    return by_numpy(model, x - x.mean(0), y)


def normalise(model, x, y):
    return denoise(model, functional.batch_norm(x, None, None, training=True), y)


def draw_from_all(model, x, y):
    return (model(torch.bernoulli((x - x.mean(0)).sigmoid())) - y).square().mean(1)


def weigh(model, x, y):
    losses = denoise(model, x, y)
    return losses / losses.detach().mean()


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks"])
@pytest.mark.parametrize(
    "loss", [mix, contrast, center, center_by_numpy, normalise, draw_from_all, weigh]
)
def test_mixed_samples_are_found_among_draws(loss, way) -> None:
    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        WAYS[way](build_mlp(), loss).check()


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks", "opacus ghost"])
@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda count: 1 / count, "1/4 of its loss alone: the mean over the batch is taken twice"),
        (lambda count: count, "4 times its loss alone: it depends on the size of the batch"),
    ],
)
def test_a_wrong_scale_is_found_among_draws(factor, message, way) -> None:
    setup = WAYS[way](build_mlp(), lambda model, x, y: factor(len(x)) * denoise(model, x, y))
    with pytest.raises(WrongTrainingError, match=message):
        setup.check()


def test_the_same_noise_in_every_step_is_found_among_draws() -> None:
    def loss(model, x, y):
        torch.manual_seed(0)
        return denoise(model, x, y)

    with pytest.raises(WrongTrainingError, match=r"0\.weight gets the same noise in every step"):
        WAYS["opacus hooks"](build_mlp(), loss).check()


def test_no_clipping_is_found_among_draws() -> None:
    setup = WAYS["opacus hooks"](build_mlp(), denoise)

    def step(x, y):
        setup.private.zero_grad()
        denoise(setup.model, x, y).mean().backward()
        setup.private.original_optimizer.step()

    with pytest.raises(WrongTrainingError, match="no sample's gradient is clipped"):
        setup.check(step=step)


def test_a_model_that_draws_under_checkpointing_passes() -> None:
    class Noisy(nn.Sequential):
        def forward(self, x):
            return checkpoint(
                lambda one: super(Noisy, self).forward(one + torch.randn_like(one)),
                x,
                use_reentrant=False,
            )

    model = Noisy(*build_mlp())
    found = with_dpprof(BookKeeping, model, lambda m, x, y: (m(x) - y).square().mean(1)).check()
    assert "each sample alone" not in found.unchecked
    assert found.max_relative_error < 1e-2


def test_the_gradient_is_that_of_the_same_draws() -> None:
    """One pass of autograd with a seed, clipped by hand, is what a step with that seed gives."""
    model, (x, y) = build_mlp().eval(), points()
    clipping = BookKeeping(model, 0.1)
    clipping.check(lambda x, y: denoise(model, x, y), x, y)
    torch.manual_seed(5)
    clipping.backward(denoise(model, x, y))
    found = [p.grad.clone() for p in model.parameters()]
    clipping.remove()

    torch.manual_seed(5)
    losses = denoise(model, x, y)
    expected = [torch.zeros_like(one) for one in found]
    for loss in losses:
        own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        factor = min(1.0, 0.1 / float(torch.cat([one.flatten() for one in own]).norm()))
        expected = [total + factor * one for total, one in zip(expected, own, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
