"""AdamW without noise in its second moment, against its definition step by step."""

import copy

import pytest
import torch
from one_call import BATCH, Model, prepare, train, weights

RATE, BETAS, DECAY, EPS = 0.01, (0.8, 0.9), 0.1, 1e-8
C, NOISE = 0.5, 2.0
VARIANCE = (NOISE * C / BATCH) ** 2


def adamw(model, **options):
    settings = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY, "eps": EPS} | options
    return torch.optim.AdamW(model.parameters(), **settings)


def prepare_adam(model, floor, **options):
    settings = {"max_grad_norm": C, "noise_multiplier": NOISE, "second_moment_floor": floor}
    return prepare(model, optimizer=adamw(model), **settings | options)


def watch(private):
    """Keep the gradients of each step, which have noise."""
    optimizer, steps = private.optimizer.original_optimizer, []
    optimizer.register_step_pre_hook(
        lambda inner, *_: steps.append(
            [p.grad.clone() for group in inner.param_groups for p in group["params"]]
        )
    )
    return steps


def step_by_definition(begin, steps, floor, variance=VARIANCE):
    """Algorithm 1 of the source, with AdamW's weight decay."""
    weights, first, second = begin, 0.0, 0.0
    for t, gradients in enumerate(steps, 1):
        gradient = torch.cat([part.flatten() for part in gradients])
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        mean, square = first / (1 - BETAS[0] ** t), second / (1 - BETAS[1] ** t)
        divisor = (square - variance).clamp(min=floor).sqrt()
        weights = weights * (1 - RATE * DECAY) - RATE * mean / divisor
    return weights


@pytest.mark.parametrize("floor", [1e-4, 1e-2, 10.0])
def test_it_is_the_step_of_its_definition(floor) -> None:
    model = Model().double()
    begin = weights(model).clone()
    private = prepare_adam(model, floor)
    steps = watch(private)
    train(private, model)

    assert len(steps) == 8
    expected = step_by_definition(begin, steps, floor)
    torch.testing.assert_close(weights(model), expected, rtol=1e-9, atol=1e-12)


def test_the_variance_is_that_of_the_noise_in_a_step() -> None:
    """A large layer without samples' gradients: its second moment is all noise."""
    model = Model().double()
    private = prepare_adam(model, 1e-12, max_grad_norm=1e-3, noise_multiplier=1e3)
    steps = watch(private)
    train(private, model, epochs=20)

    squares = torch.cat([part.flatten() for step in steps for part in step]).square().mean()
    states = private.optimizer.state.values()
    seen = [state["noise_variance"] / (1 - BETAS[1] ** state["step"].item()) for state in states]
    assert seen == pytest.approx([1 / BATCH**2] * len(seen))
    assert float(squares) == pytest.approx(1 / BATCH**2, rel=0.1)


def test_without_noise_it_is_adamw_but_for_its_epsilon() -> None:
    model, other = Model().double(), Model().double()
    train(prepare_adam(model, 1e-30, noise_multiplier=0.0), model)
    train(prepare_adam(other, None, noise_multiplier=0.0), other)

    torch.testing.assert_close(weights(model), weights(other), rtol=1e-4, atol=1e-6)


def test_noise_that_falls_counts_as_it_was_averaged() -> None:
    model = Model().double()
    private = prepare_adam(model, 1e-4)
    train(private, model, epochs=1)
    private.optimizer.noise_multiplier = 0.0
    train(private, model, epochs=1)

    [state, *_] = private.optimizer.state.values()
    share = BETAS[1] ** 4 * (1 - BETAS[1] ** 4)
    assert state["noise_variance"] == pytest.approx(share * VARIANCE)


def test_removed_it_leaves_adamw() -> None:
    model = Model().double()
    private = prepare_adam(model, 1e-3)
    inner = private.optimizer.original_optimizer
    assert len(inner._optimizer_step_post_hooks) == 1
    private.remove()
    loss = model.losses(*(torch.ones(2, *shape).double() for shape in ((5,), ())))
    loss.mean().backward()
    before = copy.deepcopy((model, inner.state_dict()))
    inner.step()
    assert not inner._optimizer_step_post_hooks

    other, state = before
    usual = adamw(other)
    usual.load_state_dict(state)
    for parameter, stepped in zip(other.parameters(), model.parameters(), strict=True):
        parameter.grad = stepped.grad
    usual.step()
    assert torch.equal(weights(other), weights(model))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"second_moment_floor": 0.0}, "second_moment_floor must be positive and finite, and is 0"),
        ({"optimizer": "SGD"}, "for torch.optim.AdamW without amsgrad, and the optimizer is SGD"),
        ({"optimizer": "amsgrad"}, "without amsgrad"),
        ({"noise": "banded", "bands": 2, "folds": 2, "steps": 8}, "differs from step to step"),
    ],
)
def test_what_is_refused(options, said) -> None:
    model = Model().double()
    name = options.pop("optimizer", None)
    kinds = {None: adamw(model), "amsgrad": adamw(model, amsgrad=True)}
    kinds["SGD"] = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"second_moment_floor": 1e-4, "optimizer": kinds[name]} | options

    with pytest.raises(ValueError, match=said):
        prepare(model, **settings)
