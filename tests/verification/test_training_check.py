"""Users' own loops: right ones pass, nothing stays changed, and what cannot be seen is told."""

import copy
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPPerLayerOptimizer
from private_loops import (
    BOUND,
    MODELS,
    SETTINGS,
    WAYS,
    B,
    ByHand,
    build_llama,
    build_mlp,
    check_by_hand,
    noisy_loss,
    points,
    points_loss,
    token_loss,
    tokens,
    trained,
    with_dpprof,
    with_hooks,
)
from torch import nn
from torch.optim import SGD

import dpprof.private.norms
from dpprof.private import (
    BookKeeping,
    FlashClipping,
    Mechanism,
    NoisyOptimizer,
    PerLayerClipping,
    check,
)
from dpprof.private.checks.draws import StepWatcher
from dpprof.private.noise.noise import DRAWN_IN_TURN, NoiseOfStep
from dpprof.private.noise.noise_keys import StepKey
from dpprof.private.norms.triton_ops import add_noise_

QUICK = {
    ("flash", "gpt2"),
    ("flash-bk", "llama"),
    ("opacus hooks", "llama"),
    ("opacus ghost", "gpt2"),
}


def test_a_loop_is_taken_without_the_noise_of_our_kernel(monkeypatch) -> None:
    launches = []
    kernel = SimpleNamespace(launch_noise=lambda *given: launches.append(given))
    monkeypatch.setattr(dpprof.private.norms, "triton_launch", kernel, raising=False)
    with StepWatcher(silent=True):
        add_noise_(torch.ones(4), torch.ones(2, dtype=torch.int64), 0, 1.0, 0.5)
    assert [call[3:] for call in launches] == [(0.0, 0.5)]


def test_a_loop_is_taken_without_the_noise_of_long_sums() -> None:
    summed = torch.ones(DRAWN_IN_TURN + 1)
    with StepWatcher(silent=True):
        NoiseOfStep(1.0, 4, StepKey(bytes(32))).add_to(summed)
    assert summed.unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        case if case in QUICK or case[1] == "mlp" else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(WAYS, MODELS)
    ],
)
def test_right_loops_pass(way, kind) -> None:
    build, loss, draw = MODELS[kind]
    setup = WAYS[way](build(), loss)
    found = setup.check(draw())

    assert (found.samples, found.parameters) == (B, len(trained(setup.model)))
    assert found.max_relative_error < 1e-2
    assert any(one.startswith("noise of the right scale") for one in found.checked)
    assert set(found.unchecked) <= {"empty batch", "padding"}
    assert ("padding changes nothing" in found.checked) == (kind != "mlp")


def test_a_right_loop_by_hand_passes() -> None:
    found = check_by_hand(build_mlp())

    assert found.max_relative_error < 1e-4
    assert "an empty batch contributes nothing" in found.checked


@pytest.mark.parametrize(("scale", "what"), [(1e3, "scale of the loss"), (1e-3, "clipping")])
def test_what_a_fixed_bound_hides_is_told(scale, what) -> None:
    found = check_by_hand(build_mlp(), lambda *batch: scale * points_loss(*batch))
    assert set(found.unchecked) == {what, "dropout", "padding"}


@pytest.mark.parametrize(
    ("multiplier", "rate", "what", "why"),
    [
        (0.0, 0.1, "noise", "the noise multiplier is 0"),
        (0.8, 0.0, "weights change", "the learning rate of 3.bias is 0"),
    ],
)
def test_what_cannot_be_seen_is_told(multiplier, rate, what, why) -> None:
    setup = with_dpprof(FlashClipping, build_mlp(), points_loss)
    setup.private.noise_multiplier = multiplier
    setup.private.param_groups[0]["lr"] = rate
    assert setup.check().unchecked[what] == why


def test_padding_is_given_where_there_is_no_mask() -> None:
    def loss(model, ids_BT, labels_BT):
        return token_loss(model, ids_BT, torch.ones_like(ids_BT), labels_BT)

    ids_BT, mask_BT, labels_BT = tokens()
    setup = with_dpprof(BookKeeping, build_llama(), loss)
    found = setup.check((ids_BT, labels_BT))
    assert found.unchecked["padding"].startswith("the batch has no mask of 0 and 1; give")
    found = setup.check((ids_BT, labels_BT), padding=mask_BT == 0)
    assert "padding changes nothing" in found.checked


@pytest.mark.parametrize("loss", [points_loss, noisy_loss])
def test_a_step_that_splits_its_batch_passes(loss) -> None:
    setup = with_hooks(build_mlp(), loss)

    def step(x, y):
        for at in range(0, B, 2):
            if at + 2 < B:
                setup.private.signal_skip_step()
            setup.private.zero_grad()
            loss(setup.model, x[at : at + 2], y[at : at + 2]).mean().backward()
            setup.private.step()

    assert setup.check(step=step).max_relative_error < 1e-4


def test_an_empty_batch_that_fails_or_is_skipped_is_told() -> None:
    def loss(model, x, y):
        if not len(x):
            raise ValueError("no samples")
        return points_loss(model, x, y)

    found = with_hooks(build_mlp(), loss).check()
    assert found.unchecked["empty batch"] == "not supported: ValueError: no samples"

    model = build_mlp()
    loop = ByHand(model, points_loss)

    def skipping(x, y):
        if len(x):
            loop.step(x, y)

    found = check(model, points_loss, points(), loop.mechanism, step=skipping)
    assert "reveals that it is empty" in found.unchecked["empty batch"]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_opacus_may_listen_to_a_model_without_wrapping_it(mode) -> None:
    model = build_mlp()
    data = torch.utils.data.TensorDataset(*points())
    hooks, private, *criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        data_loader=torch.utils.data.DataLoader(data, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        grad_sample_mode=mode,
        wrap_model=False,
    )

    def loss(model, x, y):
        if not criterion:
            return points_loss(model, x, y)
        found = criterion[0](model(x), y)
        found.loss_per_sample = found.loss_per_sample.mean(1)
        return found

    found = check(model, loss, points(), private)
    assert found.max_relative_error < 1e-2
    assert "every trained parameter is in the optimizer" in found.checked
    hooks.cleanup()


def test_each_layers_own_bound_is_known() -> None:
    setup = with_dpprof(PerLayerClipping, build_mlp(), points_loss)
    assert setup.check().max_relative_error < 1e-2

    setup = with_hooks(build_mlp(), points_loss)
    sgd = setup.private.original_optimizer
    private = DPPerLayerOptimizer(sgd, max_grad_norm=[0.1, 0.2, 0.3, 0.4], **SETTINGS)
    assert setup._replace(private=private).check().parameters == 4


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks", "opacus ghost"])
def test_it_leaves_everything_as_it_was(way) -> None:
    setup = model, loss, private = WAYS[way](build_mlp(), points_loss)
    private.original_optimizer.param_groups[0]["momentum"] = 0.9
    counted = []
    private.attach_step_hook(counted.append)

    def train():
        private.zero_grad()
        value = loss(model, *points())
        value = value.mean() if way == "opacus hooks" else value
        private.clipping.backward(value) if way == "flash-bk" else value.backward()
        private.step()

    train()
    other = copy.deepcopy([p.detach() for p in model.parameters()])
    momenta = copy.deepcopy(private.original_optimizer.state_dict()["state"])
    gradients = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    ours = {"exact": True} if way == "flash-bk" else {}
    noise = str(private.state_dict(**ours).get("privacy"))
    setup.check()

    assert len(counted) == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert str(private.state_dict(**ours).get("privacy")) == noise
    assert all(map(torch.equal, model.parameters(), other))
    assert all(map(torch.equal, [p.grad for p in model.parameters()], gradients))
    for at, one in private.original_optimizer.state_dict()["state"].items():
        assert torch.equal(one["momentum_buffer"], momenta[at]["momentum_buffer"])
    train()
    assert len(counted) == 2


def test_a_clipping_alone_is_checked_and_the_loop_goes_on() -> None:
    model = build_mlp()
    clipping = BookKeeping(model, BOUND)
    optimizer = NoisyOptimizer(SGD(trained(model), lr=0.1), clipping, **SETTINGS)

    clipping.backward(points_loss(model, *points()))
    optimizer.accumulate()  # the first part of a batch
    before = [clipping.sums.total[p].clone() for p in trained(model)]

    found = check(model, points_loss, points(), clipping)

    for parameter, summed in zip(trained(model), before, strict=True):
        assert torch.equal(clipping.sums.total[parameter], summed)
    optimizer.zero_grad()
    assert set(found.unchecked) >= {"optimizer", "noise"}
    assert "the gradient is that of single samples, clipped" in found.checked
    clipping.backward(points_loss(model, *points()))
    optimizer.step()
    with pytest.raises(ValueError, match="give that as private"):
        check(model, points_loss, points(), clipping, step=optimizer.step)


def test_a_check_between_backward_and_step_leaves_the_batchs_sum() -> None:
    model = build_mlp()
    optimizer = NoisyOptimizer(
        SGD(model.parameters(), lr=1.0),
        BookKeeping(model, 1.0),
        noise_multiplier=0.0,
        expected_batch_size=B,
    )
    steps = []
    for is_checked in (False, True):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        torch.manual_seed(1)
        optimizer.clipping.backward(points_loss(model, *points()))
        if is_checked:
            check(model, points_loss, points(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        steps.append(after - before)
        nn.utils.vector_to_parameters(before, model.parameters())
    assert steps[0].any()
    assert torch.equal(*steps)


def test_bad_arguments_are_refused() -> None:
    setup = with_hooks(build_mlp(), points_loss)
    x, y = points()
    sgd = setup.private.original_optimizer
    with pytest.raises(TypeError, match=r"private must be an optimizer of Opacus, .* is a SGD"):
        setup._replace(private=sgd).check()
    with pytest.raises(ValueError, match=r"at least two samples, samples first, and is \(1, 5\)"):
        setup.check((x[:1], y[:1]))
    with pytest.raises(ValueError, match="give the loop's step"):
        setup._replace(private=Mechanism(sgd, 1.0, 1.0, 4)).check()
    system = random.SystemRandom()
    with pytest.raises(ValueError, match="loss draws numbers that cannot be repeated"):
        setup._replace(loss=lambda *batch: points_loss(*batch) * system.random()).check()
    with pytest.raises(ValueError, match="padding must be bool and as large as the tokens"):
        setup.check(padding=torch.ones(2, 2, dtype=torch.bool))
