"""Optimizers that PyTorch does not have compute what their sources define."""

import torch
from factory import make_experiment
from torch import nn
from torch.optim import AdamW

from dpprof.predict.estimate import estimate
from dpprof.subjects.optimizers import make_optimizer, step_in_backward

WIDE = {"model": {"vocab_size": 64, "d_model": 64, "layers": 3, "heads": 2}}
WIDE |= {"method": "standard", "batch_size": 1, "seq_len": 4}


def test_lamb_is_adams_update_as_long_as_the_parameter() -> None:
    """You et al. 2020, algorithm 2, in float64, for two steps."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    expected, rate = parameter.detach().clone(), 0.01
    mean = square = torch.zeros_like(expected)
    experiment = make_experiment(method="standard", optimizer="lamb", learning_rate=rate)
    optimizer = make_optimizer(experiment, [parameter])
    for step in (1, 2):
        parameter.grad = gradient = torch.randn_like(expected)
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        corrected = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        update = corrected[0] / (corrected[1].sqrt() + 1e-6) + 0.01 * expected
        expected = expected - rate * expected.norm() / update.norm() * update

        torch.testing.assert_close(parameter.detach(), expected)


def test_lamb_changes_a_parameter_of_zeros() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    make_optimizer(make_experiment(method="standard", optimizer="lamb"), [parameter]).step()

    assert torch.allclose(parameter.detach(), torch.full((4,), -1e-3), rtol=1e-4)


def test_stepping_in_backward_trains_as_adamw_and_leaves_no_gradient() -> None:
    def train(make) -> tuple[list[torch.Tensor], nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = make([*model.parameters()], lr=0.01)
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            left = [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
        return left, model

    left, in_backward = train(lambda *given, **named: step_in_backward(AdamW(*given, **named)))
    _, usual = train(AdamW)

    assert not left
    for one, other in zip(in_backward.parameters(), usual.parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_few_parameters_live_at_a_time() -> None:
    def most(optimizer: str) -> int:
        memory = estimate(make_experiment(**WIDE, optimizer=optimizer), lambda _: None).memory
        return max(memory.timeline.components["gradients"])

    assert most("adamw-in-backward") == 4 * (64 * 256 + 256)  # of the widest layer
    assert most("adamw") > 3 * 12 * 64**2 * 4
