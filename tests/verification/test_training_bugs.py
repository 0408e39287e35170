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
    Setup,
    build_gpt2,
    build_llama,
    build_mlp,
    check_by_hand,
    logits_of,
    noisy_loss,
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

from dpprof.private import BookKeeping, WrongTrainingError


def divided(model, x, y):
    return points_loss(model, x, y) / len(x)


def is_found(message, setup, batch=None, **others) -> None:
    with pytest.raises(WrongTrainingError, match=message):
        setup.check(batch, **others)


LOOPS = {
    "clips the sum": "gradient of the batch is clipped as a whole, and not that of each",
    "bound": r"samples are clipped to a bound of 1, and the noise is for one of 0\.5",
    "no noise": r"3\.weight gets no noise",
    "noise": r"the noise has a standard deviation of 0\.0\d+, and noise multiplier",
    "seed": r"0\.weight gets the same noise in every step",
    "divided twice": "is divided twice by the expected batch size, 5",
    "clears nothing": "a second step adds to the gradients of the first; clear them in each",
    "dropped": r"0\.bias: the optimizer is given no gradient, and it is trained",
    "steps twice": "one step on a batch steps the optimizer 2 times, and an accountant",
    "forgets to step": "the step did not step the optimizer",
    "thaws": r"0\.weight is frozen, and a step changes it",
}


@pytest.mark.parametrize(
    ("wrong", "loss"),
    [(one, points_loss) for one in LOOPS] + [(one, noisy_loss) for one in [*LOOPS][:7]],
)
def test_wrong_loops_by_hand_are_found(wrong, loss) -> None:
    model = build_mlp()
    model[0] = nn.Linear(5, 700)  # so many elements that the noise's scale is known
    model[3] = nn.Linear(700, 3)
    model[0].weight.requires_grad_(wrong != "thaws")
    with pytest.raises(WrongTrainingError, match=LOOPS[wrong]):
        check_by_hand(model, loss, wrong)


def test_half_the_noise_is_found_in_a_small_model() -> None:
    with pytest.raises(WrongTrainingError, match=r"all parameters: the noise has a standard dev"):
        check_by_hand(build_mlp(), wrong="half noise")


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks", "opacus ghost"])
def test_adapters_that_the_optimizer_does_not_have_are_found(way) -> None:
    model = build_llama()
    head = model.get_output_embeddings().requires_grad_(True)
    setup = WAYS[way](model, token_loss)
    setup.private.original_optimizer.param_groups[0]["params"] = list(head.parameters())
    message = r"lora_A\.default\.weight is trained, and the optimizer does not have it"
    is_found(message, setup, tokens())


def test_adapters_without_gradient_are_found() -> None:
    """Reentrant checkpointing of a frozen model: nothing below requires a gradient."""
    model = build_llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    setup = with_dpprof(BookKeeping, model.train(), token_loss)
    with pytest.raises(ValueError, match="reentrant checkpointing hides layers from the check"):
        setup.check(tokens())
    model.disable_input_require_grads()
    is_found(r"on no trained parameter; .* reentrant checkp", setup, tokens())


def positionless_loss(model, ids_BT):
    logits_BVT = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].transpose(1, 2)
    return functional.cross_entropy(logits_BVT, ids_BT[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("way", ["opacus hooks", "opacus ghost"])
def test_position_ids_that_samples_share_are_found(way) -> None:
    message = r"wpe: this layer sees one entry for all 4 samples.*position ids"
    is_found(message, WAYS[way](build_gpt2(), positionless_loss), tokens()[:1])


def test_flash_bk_needs_no_position_ids() -> None:
    checked = WAYS["flash-bk"](build_gpt2(), positionless_loss).check(tokens()[:1])

    assert checked.samples == 4


@pytest.mark.parametrize("way", ["opacus hooks", "flash-bk"])
def test_a_mask_that_is_ignored_is_found(way) -> None:
    def loss(model, ids_BT, mask_BT, labels_BT):
        return token_loss(model, ids_BT, torch.ones_like(mask_BT), labels_BT)

    batch = tokens(left=True)
    setup = WAYS[way](build_llama(), token_loss)
    assert "padding changes nothing" in setup.check(batch).checked
    is_found("for a mask that the model does not get", setup._replace(loss=loss), batch)


def divide_again(setup, x, y):
    (points_loss(setup.model, x, y).mean() / len(x)).backward()
    setup.private.step()


def step_inside(setup, x, y):
    points_loss(setup.model, x, y).mean().backward()
    setup.private.original_optimizer.step()


@pytest.mark.parametrize(
    ("wrong", "bound", "message"),
    [
        # All samples are clipped.
        (divide_again, 1e-3, "is 1/4 of its own before it is clipped"),
        (step_inside, BOUND, "no sample's gradient is clipped"),
    ],
)
def test_a_wrong_step_with_a_right_loss_is_found(wrong, bound, message) -> None:
    setup = with_hooks(build_mlp(), points_loss)
    setup.private.max_grad_norm = bound

    def step(x, y):
        setup.private.zero_grad()
        wrong(setup, x, y)

    is_found(message, setup, step=step)


def copied():
    model = build_mlp()
    setup = with_hooks(model, points_loss)
    setup.private.original_optimizer.param_groups[0]["params"] = trained(copy.deepcopy(model))
    return setup


def frozen():
    setup = with_hooks(build_mlp(), points_loss)
    setup.model.requires_grad_(False)
    return setup


def still():
    class Still(SGD):
        def step(self, closure=None):
            """Do nothing."""

    model = build_mlp()
    wrapped = GradSampleModule(model)
    sgd = Still(model.parameters(), lr=0.1)
    return Setup(wrapped, points_loss, DPOptimizer(sgd, max_grad_norm=BOUND, **SETTINGS))


def of_all_tokens():
    def loss(model, ids_BT, mask_BT, labels_BT):
        logits_BVT = logits_of(model, ids_BT, mask_BT).transpose(1, 2)
        return functional.cross_entropy(logits_BVT, labels_BT[:, 1:])

    return with_hooks(build_gpt2(), loss)


def hooks(loss):
    return lambda: with_hooks(build_mlp(), loss)


SETUPS = {
    "an optimizer of another copy": (copied, r"0\.weight is trained, and the optimizer does"),
    "nothing is trained": (frozen, "no parameter of the model requires a gradient"),
    "an optimizer that moves nothing": (still, r"0\.weight: a step does not change it"),
    "a mean over all tokens": (of_all_tokens, "the mean is over all tokens of the batch"),
    "a loss that is cut off": (
        hooks(lambda *batch: points_loss(*batch).detach()),
        "the loss depends on no trained parameter",
    ),
    "a loss without a gradient": (
        hooks(lambda *batch: 0 * points_loss(*batch)),
        "every sample is zero, so nothing is learned",
    ),
    "a mean of means": (
        hooks(lambda model, x, y: points_loss(model, x, y).mean() / len(x)),
        "the loss is 1/4 of the samples' mean: the mean over",
    ),
    "a sum": (
        hooks(lambda *batch: points_loss(*batch).sum()),
        "the loss sums over the batch, and the optimizer expects a mean",
    ),
    "mixed samples": (
        hooks(lambda model, x, y: points_loss(model, x - x.mean(0), y)),
        "a sample alone has another loss than in the batch: .* mixes samples",
    ),
    "ghost clipping to another bound": (
        lambda: with_ghost(build_mlp(), points_loss, bound=2 * BOUND),
        r"clipped to a bound of 1, .* one of 0\.5",
    ),
    "ghost clipping without its criterion": (
        lambda: with_ghost(build_mlp(), points_loss)._replace(loss=points_loss),
        "not that of the criterion that Opacus wrapped",
    ),
    **{
        f"{way} of a mean that is taken twice": (
            lambda way=way: WAYS[way](build_mlp(), divided),
            "1/4 of its loss alone: the mean over the batch is taken twice",
        )
        for way in ("flash-bk", "flash", "opacus hooks", "opacus ghost")
    },
}


@pytest.mark.parametrize("wrong", SETUPS)
def test_wrong_setups_are_found(wrong) -> None:
    make, message = SETUPS[wrong]
    is_found(message, make(), tokens() if make is of_all_tokens else points())
