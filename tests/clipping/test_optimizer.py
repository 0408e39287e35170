"""A step applies one clipped and noised batch, or is refused in a sentence."""

import functools
from math import inf, nan

import numpy as np
import pytest
import torch
from small_models import EVERY, batch, build, gradients, is_clear, private, sums_of
from snapshots import assert_sentences, refusals_of
from torch import nn

from dpprof.private import BookKeeping
from dpprof.private.noise import noise
from dpprof.private.noise.noise import NoiseOfStep
from dpprof.private.noise.noise_keys import StepKey, set_words
from dpprof.private.norms import triton_ops


@pytest.fixture
def training():
    """A model, its clipping and its optimizer."""
    model = build()
    clipping = BookKeeping(model, 1.0)
    return model, clipping, private(clipping, model)


def train_another_model(_model, _clipping, optimizer) -> None:
    other = nn.Linear(2, 3)
    optimizer.original_optimizer.add_param_group({"params": list(other.parameters())})
    optimizer.step()


def write_a_gradient(model, _clipping, optimizer) -> None:
    assert is_clear(model)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()


def change_the_bound(_model, clipping, optimizer) -> None:
    optimizer.max_grad_norm = 0.25
    assert clipping.max_grad_norm == 0.25
    optimizer.step()


def add_batches_up(model, clipping, optimizer) -> None:
    for _ in range(3):
        clipping.backward(model.losses(*batch()))
    optimizer.step()


def scale_losses(model, clipping, optimizer) -> None:
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    clipping.backward(scaler.scale(model.losses(*batch()).float()))
    scaler.step(optimizer)


REFUSED = {
    r"trains a parameter of shape \(3, 2\), which its": train_another_model,
    r"head\.weight has a gradient, such as .* leave \.grad alone before it": write_a_gradient,
    "max_grad_norm changed from 1.0 to 0.25 between": change_the_bound,
    "4 batches were added up before a step": add_batches_up,
    "SGD was asked to step on gradients without noise": (
        lambda _, __, optimizer: optimizer.original_optimizer.step()
    ),
    r"no batch was clipped.*torch\.zeros\(0\)": lambda _, __, optimizer: (
        optimizer.step(),
        optimizer.step(),
    ),
    "GradScaler does not work with clipping": scale_losses,
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_step_that_is_not_of_one_clipped_batch_is_refused(training, told) -> None:
    model, clipping, optimizer = training
    clipping.backward(model.losses(*batch()))
    with pytest.raises(RuntimeError, match=told):
        REFUSED[told](model, clipping, optimizer)


@pytest.mark.parametrize("way", EVERY)
def test_a_step_without_zero_grad_is_refused(way) -> None:
    model = build()
    clipping = way(model, 1.0)
    optimizer = private(clipping, model)
    clipping.backward(model.losses(*batch()))
    optimizer.step()

    with pytest.raises(RuntimeError, match=r"has a gradient, such as the last step's.*zero_grad"):
        clipping.backward(model.losses(*batch()))
    optimizer.zero_grad(set_to_none=False)  # zeros are as good as none
    clipping.backward(model.losses(*batch()))
    optimizer.step()


def test_a_closure_computes_the_gradient_of_a_step(training) -> None:
    model, clipping, optimizer = training
    before = [p.detach().clone() for p in model.parameters()]

    optimizer.step(lambda: clipping.backward(model.losses(*batch())))

    assert not any(map(torch.equal, before, model.parameters()))


def test_settings_out_of_range_are_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    assert_sentences("clipping/optimizer", refusals_of(functools.partial(private, clipping, model)))


def test_hooks_of_a_step_see_gradients_with_noise(training) -> None:
    model, clipping, optimizer = training
    seen: list[bool] = []
    look = lambda *_: seen.append(model.head.weight.grad is not None)  # noqa: E731
    clipping.backward(model.losses(*batch()))
    with optimizer.register_step_pre_hook(look), optimizer.register_step_post_hook(look):
        optimizer.step()
    assert seen == [True, True]


def test_no_later_size_turns_noise_off(training) -> None:
    *_, optimizer = training
    optimizer.secure_mode = True  # whose noise of a negative scale was none
    for size in (-4.0, inf, nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            optimizer.expected_batch_size = size
    assert optimizer.expected_batch_size > 0


def test_after_a_hook_that_failed_the_inner_optimizer_does_not_step_alone(training) -> None:
    model, clipping, optimizer = training
    optimizer.attach_step_hook(lambda _: 1 / 0)
    clipping.backward(model.losses(*batch()))
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="asked to step on gradients without noise"):
        optimizer.original_optimizer.step()


def test_a_sum_needs_no_batch_size() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model, expected_batch_size=None, loss_reduction="sum")
    clipping.backward(model.losses(*batch()))
    summed = sums_of(clipping)
    optimizer.step()

    torch.testing.assert_close(gradients(model), summed)


def test_a_kernel_gets_a_key_for_each_step_and_a_number_for_each_sum(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(triton_ops, "is_fused", lambda _: True)
    monkeypatch.setattr(triton_ops, "add_noise_", lambda *given: calls.append(given))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    clipping = BookKeeping(model, 0.5)
    generator, same = (seeded() for _ in range(2))
    optimizer = private(
        clipping, model, noise_multiplier=2.0, expected_batch_size=4, generator=generator
    )
    for _ in range(2):
        clipping.backward(torch.zeros(0))
        optimizer.step()
        optimizer.zero_grad()

    words = [torch.empty(2, dtype=torch.int64).random_(generator=same) for _ in range(2)]
    assert [call[2:] for call in calls] == [(number, 0.25, 0.25) for number in range(4)] * 2
    assert [call[1].tolist() for call in calls] == [one.tolist() for one in words for _ in range(4)]
    assert [call[0].shape for call in calls[:4]] == [p.shape for p in model.parameters()]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def seeded_key() -> StepKey:
    return StepKey(b"", generator=seeded())


@pytest.mark.parametrize("summed", [torch.ones(3, 2).mT, torch.ones(6, dtype=torch.float64)])
def test_what_the_kernel_cannot_take_gets_noise_from_pytorch(summed, monkeypatch) -> None:
    monkeypatch.setattr(triton_ops, "is_fused", lambda _: True)
    drawn = torch.normal(0.0, 0.5, summed.shape, generator=seeded(), dtype=summed.dtype)

    NoiseOfStep(0.5, 4, seeded_key()).add_to(summed)

    torch.testing.assert_close(summed, 0.25 + drawn, rtol=0, atol=1e-7)


def test_a_parameter_without_elements_does_not_stop_a_step() -> None:
    model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2))
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    clipping.backward(model(torch.ones(2, 0)).sum(1))
    optimizer.step()
    assert optimizer.steps == 1


@pytest.fixture
def long_sum(monkeypatch) -> torch.Tensor:
    """A sum whose noise several threads draw, 32 elements at a time, and the last 16."""
    monkeypatch.setattr(noise, "DRAWN_IN_TURN", 32)
    monkeypatch.setattr(noise, "_AT_ONCE", 16)
    return torch.ones(8, 10)


def add_noise_to(summed: torch.Tensor) -> torch.Tensor:
    NoiseOfStep(0.5, 4, seeded_key()).add_to(summed)
    return summed.flatten()


def test_on_a_cpu_each_part_of_a_long_sum_gets_noise_of_its_own_generator(long_sum) -> None:
    words = noise.draw_states(3, torch.device("cpu"), seeded())
    drawn = []
    for state, count in zip(words, (32, 32, 16), strict=True):
        set_words(generator := torch.Generator(), state)
        slices = [torch.normal(0.0, 0.5, (16,), generator=generator) for _ in range(count // 16)]
        drawn += slices
    torch.testing.assert_close(add_noise_to(long_sum), 0.25 + torch.cat(drawn), rtol=0, atol=1e-7)

    assert len({float(part[0]) for part in drawn}) == len(drawn)


def test_a_generator_starts_from_all_bits_of_its_state() -> None:
    words = noise.draw_states(1, torch.device("cpu"), seeded())[0]
    known = np.random.MT19937()
    known.state = {
        "bit_generator": "MT19937",
        "state": {"key": words.numpy().astype(np.uint32), "pos": 624},
    }

    set_words(generator := torch.Generator(), words)

    drawn = torch.empty(700, dtype=torch.int32).random_(generator=generator)
    assert drawn.tolist() == [int(one) % 2**31 for one in known.random_raw(700)]
    assert words.max() > 2**31


def test_noise_of_a_long_sum_does_not_depend_on_the_number_of_threads(long_sum) -> None:
    before, again = torch.get_num_threads(), long_sum.clone()
    try:
        torch.set_num_threads(1)
        alone = add_noise_to(long_sum)
        torch.set_num_threads(3)
        assert torch.equal(alone, add_noise_to(again))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_long_sum_gets_its_noise_in_every_mode(long_sum, mode) -> None:
    expected = add_noise_to(long_sum.clone())
    with mode():
        assert torch.equal(add_noise_to(long_sum.clone()), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_long_sum_of_any_dtype_gets_noise_everywhere(long_sum, dtype) -> None:
    noise_of = add_noise_to(long_sum.to(dtype)) - 0.25

    assert noise_of.dtype == dtype
    assert noise_of.double().unique().numel() > 60
    assert 0.35 < noise_of.double().std() < 0.65


def test_no_part_of_a_sum_goes_without_noise_unnoticed(long_sum) -> None:
    words, room = torch.ones(2, 624, dtype=torch.int64), torch.empty(2, 16)
    with pytest.raises(ValueError, match="shorter"):
        torch.ops.dpprof.add_noise_in_threads_(long_sum, words, room, 0.5, 1.0)


def test_an_error_in_a_thread_ends_the_step(training, monkeypatch) -> None:
    model, clipping, optimizer = training
    optimizer.noise_multiplier = 1.0
    monkeypatch.setattr(noise, "DRAWN_IN_TURN", 8)
    monkeypatch.setattr(noise, "set_words", lambda *_: 1 / 0)
    clipping.backward(model.losses(*batch()))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert is_clear(model)
    assert not optimizer.is_within_a_batch


def test_the_noise_of_a_long_sum_is_normal() -> None:
    summed = torch.zeros(noise.DRAWN_IN_TURN * 2 + 1)
    NoiseOfStep(2.0, 4, seeded_key()).add_to(summed)

    ordered = summed.double().sort().values / 2
    quantiles = (torch.arange(len(summed)).double() + 0.5) / len(summed)
    distance = (torch.special.ndtr(ordered) - quantiles).abs().max()
    assert distance < 1.95 / len(summed) ** 0.5  # Kolmogorov: 1 of 1,000 is further


def test_a_batch_whose_step_was_refused_is_not_applied_with_the_next(training) -> None:
    model, clipping, optimizer = training
    clipping.backward(model.losses(*batch()))
    expected = sums_of(clipping)
    optimizer.accumulate()
    clipping.max_grad_norm = 7.0
    with pytest.raises(RuntimeError, match=r"max_grad_norm changed from 1\.0 to 7\.0"):
        optimizer.add_noise()
    clipping.max_grad_norm = 1.0
    clipping.backward(model.losses(*batch()))
    optimizer.step()
    torch.testing.assert_close(gradients(model), expected)


def test_parts_of_a_batch_with_a_failed_part_are_not_joined_with_the_next(training) -> None:
    model, clipping, optimizer = training
    optimizer.signal_skip_step(True)
    clipping.backward(model.losses(*batch()))
    optimizer.step()
    optimizer.signal_skip_step(False)
    with pytest.raises(ValueError, match="must be one for each sample"):
        clipping.backward(model.losses(*batch()).mean())  # the last part fails
    optimizer.signal_skip_step(True)
    clipping.backward(model.losses(*batch()))
    with pytest.raises(RuntimeError, match=r"a part of this batch may be missing; call discard"):
        optimizer.step()
    optimizer.discard()
    clipping.backward(model.losses(*batch()))
    optimizer.step()
    assert optimizer.steps == 1


def fail(model, clipping) -> None:
    """Let a backward pass begin, and raise."""
    losses = model.losses(*batch())
    with pytest.raises(RuntimeError, match="the losses depend on a parameter of shape"):
        clipping.backward(losses + nn.Parameter(torch.ones(len(losses))))


def test_a_batch_whose_sums_a_later_backward_threw_away_is_not_stepped_on(training) -> None:
    model, clipping, optimizer = training
    fail(model, clipping)
    clipping.backward(model.losses(*batch()))
    optimizer.step()  # what failed before the batch took nothing of it
    optimizer.zero_grad()

    clipping.backward(model.losses(*batch()))
    fail(model, clipping)
    with pytest.raises(RuntimeError, match=r"a part of this batch may be missing; call discard"):
        optimizer.step()
    optimizer.discard()
    clipping.backward(model.losses(*batch()))
    optimizer.step()
    assert optimizer.steps == 2


def test_the_sums_of_a_clipping_are_those_of_one_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    clipping = BookKeeping(model, 1.0)
    first = private(clipping, model, noise_multiplier=1.0)
    second = private(clipping, model[1], noise_multiplier=1.0)
    clipping.backward(model(torch.ones(2, 3))[:, 0])
    first.zero_grad()
    with pytest.raises(RuntimeError, match="another NoisyOptimizer took over the sums"):
        first.step()
    first.remove()
    with pytest.raises(RuntimeError, match=r"0\.\w+ is clipped, and this optimizer does not"):
        second.step()
    model[0].requires_grad_(False)
    second.step()
    assert second.steps == 1


def test_secure_mode_needs_a_secure_generator_whenever_it_is_turned_on() -> None:
    model = nn.Linear(3, 1)
    optimizer = private(BookKeeping(model, 1.0), model, generator=torch.Generator())
    with pytest.raises(ValueError, match="secure_mode needs a cryptographically secure generator"):
        optimizer.secure_mode = True
    with pytest.raises(AttributeError, match="generator"):
        optimizer.generator = torch.Generator().manual_seed(5)


def test_noise_that_float32_rounds_away_is_refused(training) -> None:
    model, clipping, optimizer = training
    clipping.max_grad_norm, optimizer.expected_batch_size = 1e-38, 1e8
    optimizer.noise_multiplier = 1.0
    clipping.backward(model.losses(*batch()))
    with pytest.raises(RuntimeError, match="would be rounded away in float32"):
        optimizer.step()
    assert optimizer.steps == 0
