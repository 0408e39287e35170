"""A step applies one clipped and noised batch, or is refused in a sentence."""

import pytest
import torch
from opacus.schedulers import ExponentialNoise
from small_models import EVERY, batch, build, draw, private
from torch import nn

from dpprof.clipping.book_keeping import BookKeeping
from dpprof.clipping.optimizer import NoisyOptimizer


@pytest.fixture
def training():
    """A model, its clipping and its optimizer."""
    model = build()
    clipping = BookKeeping(model, 1.0)
    return model, clipping, private(clipping, model)


def test_what_is_frozen_after_its_gradient_was_clipped_is_refused(training) -> None:
    model, clipping, optimizer = training
    clipping.backward(model.losses(*batch()))
    model.body.requires_grad_(False)

    with pytest.raises(RuntimeError, match=r"body\.weight is frozen and has a gradient"):
        optimizer.step()


def test_a_parameter_of_another_model_is_refused(training) -> None:
    model, clipping, optimizer = training
    other = nn.Linear(2, 3)
    optimizer.original_optimizer.add_param_group({"params": list(other.parameters())})
    clipping.backward(model.losses(*batch()))

    with pytest.raises(RuntimeError, match=r"trains a parameter of shape \(3, 2\), which its"):
        optimizer.step()


def test_the_optimizer_inside_refuses_to_step_without_noise(training) -> None:
    model, clipping, optimizer = training
    clipping.backward(model.losses(*batch()))
    with pytest.raises(RuntimeError, match="SGD was asked to step on gradients without noise"):
        optimizer.original_optimizer.step()
    optimizer.step()


def test_a_gradient_that_was_changed_after_it_was_clipped_is_refused(training) -> None:
    model, clipping, optimizer = training
    clipping.backward(model.losses(*batch()))
    model.head.weight.grad *= 2

    with pytest.raises(RuntimeError, match=r"the gradient of head\.weight, or the bound, changed"):
        optimizer.step()


@pytest.mark.parametrize("way", EVERY)
def test_a_step_without_zero_grad_is_refused(way) -> None:
    model = build()
    clipping = way(model, 1.0)
    optimizer = private(clipping, model)
    clipping.backward(model.losses(*batch()))
    optimizer.step()

    with pytest.raises(RuntimeError, match=r"has a gradient that is not a sum.*zero_grad"):
        clipping.backward(model.losses(*batch()))
    optimizer.zero_grad(set_to_none=False)  # zeros are as good as none
    clipping.backward(model.losses(*batch()))
    optimizer.step()


def test_batches_that_are_added_up_before_a_step_are_refused(training) -> None:
    model, clipping, optimizer = training
    for _ in range(4):
        clipping.backward(model.losses(*batch()))

    with pytest.raises(RuntimeError, match="4 batches were added up before a step"):
        optimizer.step()
    optimizer.zero_grad()
    clipping.backward(model.losses(*batch()))
    optimizer.step()


def test_a_batch_in_parts_counts_once_and_is_averaged_once() -> None:
    whole, parts = build(), build()
    clipping = BookKeeping(whole, 0.5)
    optimizer = private(clipping, whole)
    clipping.backward(whole.losses(*batch()))
    optimizer.step()
    clipping = BookKeeping(parts, 0.5)
    optimizer = private(clipping, parts)
    steps = []
    optimizer.attach_step_hook(steps.append)
    for at in range(4):
        optimizer.signal_skip_step(do_skip=at < 3)
        clipping.backward(parts.losses(*(part[at : at + 1] for part in batch())))
        optimizer.step()
        optimizer.zero_grad()

    assert len(steps) == 1
    assert optimizer.accumulated_iterations == 1
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_a_step_without_a_batch_is_refused(training) -> None:
    with pytest.raises(RuntimeError, match=r"no batch was clipped.*torch\.zeros\(0\)"):
        training[2].step()


@pytest.mark.parametrize("multiplier", [-1.0, float("inf"), float("nan")])
def test_noise_of_no_scale_is_refused(multiplier) -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be finite and at least 0"):
        private(clipping, model, noise_multiplier=multiplier)


@pytest.mark.parametrize("size", [0, -4, float("inf")])
def test_a_batch_size_to_divide_by_is_positive(size) -> None:
    model = build()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="expected_batch_size must be positive and finite"):
        NoisyOptimizer(sgd, BookKeeping(model, 1.0), noise_multiplier=1.0, expected_batch_size=size)


def test_the_noise_has_the_bound_of_the_clipping_whoever_changes_it(training) -> None:
    model, clipping, optimizer = training
    optimizer.max_grad_norm = 0.25
    assert clipping.max_grad_norm == 0.25
    clipping.backward(model.losses(*batch()))
    clipping.max_grad_norm = 10.0

    with pytest.raises(RuntimeError, match="or the bound, changed after it was clipped"):
        optimizer.step()


def test_grad_scaler_is_refused() -> None:
    model = build().float()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    scaler = torch.amp.GradScaler("cpu")
    clipping.backward(scaler.scale(model.losses(*draw(4, 7))))

    with pytest.raises(RuntimeError, match="GradScaler does not work with clipping"):
        scaler.step(optimizer)


def test_schedulers_of_pytorch_and_of_opacus_move_what_they_schedule() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model, noise_multiplier=2.0)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    noise = ExponentialNoise(optimizer, gamma=0.25)
    clipping.backward(model.losses(*batch()))
    optimizer.step()
    rate.step()
    noise.step()

    assert optimizer.original_optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.noise_multiplier == 0.5


def test_a_state_that_was_saved_is_loaded_into_the_optimizer_inside() -> None:
    states = []
    for given in (None, 1.0):
        model = build()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        clipping = BookKeeping(model, 1.0)
        optimizer = NoisyOptimizer(sgd, clipping, noise_multiplier=0.0, expected_batch_size=4)
        if given is None:
            clipping.backward(model.losses(*batch()))
            optimizer.step()
        else:
            optimizer.load_state_dict(states[0])
        assert optimizer.state is sgd.state
        states.append(optimizer.state_dict())

    momenta = [[one["momentum_buffer"] for one in found["state"].values()] for found in states]
    assert momenta[0]
    assert all(map(torch.equal, *momenta))


def test_a_closure_computes_the_gradient_of_a_step(training) -> None:
    model, clipping, optimizer = training
    before = [p.detach().clone() for p in model.parameters()]

    optimizer.step(lambda: clipping.backward(model.losses(*batch())))

    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss_reduction": "max"}, "loss_reduction must be 'mean' or 'sum', and is 'max'"),
        ({"expected_batch_size": None}, "expected_batch_size must be given where"),
    ],
)
def test_an_average_that_cannot_be_taken_is_refused(settings, told) -> None:
    model = build()
    sgd = torch.optim.SGD(model.parameters())
    settings = {"expected_batch_size": 4} | settings
    with pytest.raises(ValueError, match=told):
        NoisyOptimizer(sgd, BookKeeping(model, 1.0), noise_multiplier=1.0, **settings)


def test_a_sum_needs_no_batch_size() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    sgd = torch.optim.SGD(model.parameters())
    options = {"expected_batch_size": None, "loss_reduction": "sum"}
    optimizer = NoisyOptimizer(sgd, clipping, noise_multiplier=0.0, **options)
    clipping.backward(model.losses(*batch()))
    sums = [p.grad.clone() for p in model.parameters()]
    optimizer.step()

    for p, summed in zip(model.parameters(), sums, strict=True):
        torch.testing.assert_close(p.grad, summed)
