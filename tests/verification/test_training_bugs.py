"""Users' own loops: of a wrong one the first wrong thing is named."""

import copy

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from private_loops import (
    BOUND,
    SETTINGS,
    WAYS,
    build_gpt2,
    build_llama,
    build_mlp,
    check_by_hand,
    logits_of,
    points,
    points_loss,
    token_loss,
    tokens,
    trained,
    with_dpprof,
    with_ghost,
    with_hooks,
)
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from dpprof.clipping import BookKeeping
from dpprof.verification import WrongTrainingError, check


def divided(model, x, y):
    return points_loss(model, x, y) / len(x)


def mean_of_means(model, x, y):
    return points_loss(model, x, y).mean() / len(x)


def summed(model, x, y):
    return points_loss(model, x, y).sum()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("clips the sum", "gradient of the batch is clipped as a whole, and not that of each"),
        ("bound", r"samples are clipped to a bound of 1, and the noise is for one of 0\.5"),
        ("no noise", r"3\.weight gets no noise"),
        ("noise", r"the noise has a standard deviation of 0\.0\d+, and noise multiplier"),
        ("seed", r"0\.weight gets the same noise in every step"),
        ("dropped", r"0\.bias: the optimizer is given no gradient, and it is trained"),
        ("divided twice", "is divided twice by the expected batch size, 5"),
        ("clears nothing", "a second step adds to the gradients of the first; clear them in each"),
        ("steps twice", "one step on a batch steps the optimizer 2 times, and an accountant"),
        ("forgets to step", "the step did not step the optimizer"),
    ],
)
def test_wrong_loops_by_hand_are_found(wrong, message) -> None:
    model = build_mlp()
    model[0] = nn.Linear(5, 700)  # so many elements that the noise's scale is known
    model[3] = nn.Linear(700, 3)
    with pytest.raises(WrongTrainingError, match=message):
        check_by_hand(model, wrong=wrong)


def test_a_frozen_parameter_that_changes_is_found() -> None:
    model = build_mlp()
    model[0].weight.requires_grad_(False)
    with pytest.raises(WrongTrainingError, match=r"0\.weight is frozen, and a step changes it"):
        check_by_hand(model, wrong="thaws")


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks", "opacus ghost"])
def test_adapters_that_the_optimizer_does_not_have_are_found(way) -> None:
    pytest.importorskip("peft")
    model = build_llama()
    model.get_output_embeddings().requires_grad_(True)
    setup = WAYS[way](model, token_loss)
    setup.private.original_optimizer.param_groups[0]["params"] = list(
        model.get_output_embeddings().parameters()
    )
    message = r"lora_A\.default\.weight is trained, and the optimizer does not have it"
    with pytest.raises(WrongTrainingError, match=message):
        check(setup.model, setup.loss, tokens(), setup.private)


def test_adapters_without_gradient_are_found() -> None:
    """Reentrant checkpointing of a frozen model: nothing below requires a gradient."""
    model = build_llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    setup = with_dpprof(BookKeeping, model.train(), token_loss)
    with pytest.raises(ValueError, match="reentrant checkpointing hides layers from the check"):
        check(setup.model, token_loss, tokens(), setup.private)
    model.disable_input_require_grads()
    with pytest.raises(WrongTrainingError, match=r"on no trained parameter; .* reentrant checkp"):
        check(setup.model, token_loss, tokens(), setup.private)


def test_an_optimizer_that_moves_nothing_is_found() -> None:
    class Still(SGD):
        def step(self, closure=None):
            """Do nothing."""

    model = build_mlp()
    wrapped = GradSampleModule(model)
    private = DPOptimizer(Still(model.parameters(), lr=0.1), max_grad_norm=BOUND, **SETTINGS)
    with pytest.raises(WrongTrainingError, match=r"0\.weight: a step does not change it"):
        check(wrapped, points_loss, points(), private)


@pytest.mark.parametrize(
    ("way", "loss", "message"),
    [
        ("flash-bk", divided, "1/4 of its loss alone: the mean over the batch is taken twice"),
        ("flash", divided, "the mean over the batch is taken twice"),
        ("opacus hooks", divided, "the mean over the batch is taken twice"),
        ("opacus ghost", divided, "the mean over the batch is taken twice"),
        ("opacus hooks", mean_of_means, "the loss is 1/4 of the samples' mean: the mean over"),
        ("opacus hooks", summed, "the loss sums over the batch, and the optimizer expects a mean"),
    ],
)
def test_wrong_scales_of_losses_are_found(way, loss, message) -> None:
    setup = WAYS[way](build_mlp(), loss)
    with pytest.raises(WrongTrainingError, match=message):
        check(setup.model, setup.loss, points(), setup.private)


def test_a_wrong_scale_inside_of_a_step_is_found_although_samples_are_clipped() -> None:
    setup = with_hooks(build_mlp(), points_loss)
    setup.private.max_grad_norm = 1e-3

    def step(x, y):
        setup.private.zero_grad()
        (points_loss(setup.model, x, y).mean() / len(x)).backward()
        setup.private.step()

    with pytest.raises(WrongTrainingError, match="is 1/4 of its own before it is clipped"):
        check(setup.model, points_loss, points(), setup.private, step=step)


def test_a_mean_over_all_tokens_is_found() -> None:
    def loss(model, ids_BT, mask_BT, labels_BT):
        logits_BVT = logits_of(model, ids_BT, mask_BT).transpose(1, 2)
        return functional.cross_entropy(logits_BVT, labels_BT[:, 1:])

    setup = with_hooks(build_gpt2(), loss)
    with pytest.raises(WrongTrainingError, match="the mean is over all tokens of the batch"):
        check(setup.model, loss, tokens(), setup.private)


@pytest.mark.parametrize("way", ["opacus hooks", "opacus ghost", "flash-bk"])
def test_position_ids_that_samples_share_are_found(way) -> None:
    def loss(model, ids_BT):
        logits_BVT = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].transpose(1, 2)
        return functional.cross_entropy(logits_BVT, ids_BT[:, 1:], reduction="none").mean(1)

    setup = WAYS[way](build_gpt2(), loss)
    with pytest.raises(
        WrongTrainingError, match=r"wpe: this layer sees 1 in the place of 4 samples.*position ids"
    ):
        check(setup.model, setup.loss, tokens()[:1], setup.private)


@pytest.mark.parametrize("way", ["opacus hooks", "flash-bk"])
def test_a_mask_that_is_ignored_is_found(way) -> None:
    def loss(model, ids_BT, mask_BT, labels_BT):
        return token_loss(model, ids_BT, torch.ones_like(mask_BT), labels_BT)

    batch = tokens(left=True)
    setup = WAYS[way](build_llama(), token_loss)
    assert "padding changes nothing" in check(*setup[:2], batch, setup.private).checked
    with pytest.raises(WrongTrainingError, match="its gradient depends on padded tokens; give"):
        check(setup.model, loss, batch, setup.private)


def test_a_step_of_the_optimizer_that_opacus_wraps_is_found() -> None:
    setup = with_hooks(build_mlp(), points_loss)

    def step(x, y):
        setup.private.zero_grad()
        points_loss(setup.model, x, y).mean().backward()
        setup.private.original_optimizer.step()

    with pytest.raises(WrongTrainingError, match="no sample's gradient is clipped"):
        check(setup.model, points_loss, points(), setup.private, step=step)


def copied():
    model = build_mlp()
    setup = with_hooks(model, points_loss)
    setup.private.original_optimizer.param_groups[0]["params"] = trained(copy.deepcopy(model))
    return setup


def frozen():
    setup = with_hooks(build_mlp(), points_loss)
    setup.model.requires_grad_(False)
    return setup


SETUPS = {
    "an optimizer of another copy": (copied, r"0\.weight is trained, and the optimizer does"),
    "nothing is trained": (frozen, "no parameter of the model requires a gradient"),
    "a loss that is cut off": (
        lambda: with_hooks(build_mlp(), lambda *batch: points_loss(*batch).detach()),
        "the loss depends on no trained parameter",
    ),
    "a loss without a gradient": (
        lambda: with_hooks(build_mlp(), lambda *batch: 0 * points_loss(*batch)),
        "every sample is zero, so nothing is learned",
    ),
    "ghost clipping to another bound": (
        lambda: with_ghost(build_mlp(), points_loss, bound=2 * BOUND),
        r"clipped to a bound of 1, .* one of 0\.5",
    ),
    "ghost clipping without its criterion": (
        lambda: with_ghost(build_mlp(), points_loss)._replace(loss=points_loss),
        "not that of the criterion that Opacus wrapped",
    ),
    "mixed samples": (
        lambda: with_hooks(build_mlp(), lambda model, x, y: points_loss(model, x - x.mean(0), y)),
        r"loss of sample 0 is .* mixes samples",
    ),
}


@pytest.mark.parametrize("wrong", SETUPS)
def test_wrong_setups_are_found(wrong) -> None:
    make, message = SETUPS[wrong]
    setup = make()
    with pytest.raises(WrongTrainingError, match=message):
        check(setup.model, setup.loss, points(), setup.private)
