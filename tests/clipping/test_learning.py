"""Trainings that fail to learn for a known reason are told so, and those that learn are not."""

import re

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from dpprof.private import (
    BookKeeping,
    LearningMonitor,
    NoisyOptimizer,
    check,
    make_private,
)

SAMPLES, WIDTH = 64, 6


class Lora(nn.Module):
    """A frozen layer with an adapter, of which B begins at zero."""

    def __init__(self, *, trains_b: bool = True, draws_a: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 1).requires_grad_(requires_grad=False)
        self.A, self.B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.B.weight).requires_grad_(trains_b)
        if not draws_a:
            nn.init.zeros_(self.A.weight)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


def losses_of(model, x, y):
    return (model(x) - y).square().mean(1)


def data(width=WIDTH):
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, width)
    return x, 3 * x.sum(1, keepdim=True) + 1


def make_optimizer(model, *, bound=1.0, noise=1.0, batch_size=SAMPLES, rate=0.1):
    trained = [p for p in model.parameters() if p.requires_grad]
    return NoisyOptimizer(
        torch.optim.SGD(trained, lr=rate),
        BookKeeping(model, bound),
        noise_multiplier=noise,
        expected_batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
    )


def obstacles_of(model, *, data_is_public=True, **settings) -> tuple[str, ...]:
    optimizer = make_optimizer(model, **settings)
    found = check(model, losses_of, data(), optimizer, data_is_public=data_is_public)
    return found.obstacles


@pytest.mark.parametrize("build", [lambda: nn.Linear(WIDTH, 1), Lora])
def test_a_training_that_learns_has_no_obstacle(build) -> None:
    assert obstacles_of(build()) == ()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bound": 1e3}, "no sample is clipped: norms are .* needs"),
        ({"bound": 1e-3}, "every sample is clipped to less than a tenth"),
        ({"noise": 1e4}, "signal is far below the noise: .* after [0-9,]+ steps at the earliest"),
        ({"batch_size": 0.01}, "signal is far below the noise"),
        ({"rate": 0.0}, "learning rate of bias is 0"),
    ],
)
def test_check_names_what_keeps_from_learning(settings, said, caplog) -> None:
    (found,) = obstacles_of(nn.Linear(WIDTH, 1), **settings)

    assert re.search(said, found)
    assert f"check: {found}" in caplog.messages


def test_noise_of_the_length_that_is_told() -> None:
    torch.manual_seed(0)
    x, y = torch.zeros(8, 1), torch.full((8, 1), -2.0)  # every clipped gradient is 1, of the bias
    model = nn.Linear(1, 1)
    optimizer = make_optimizer(model, noise=100.0, batch_size=1)

    (found,) = check(model, losses_of, (x, y), optimizer, data_is_public=True).obstacles

    # The noise's norm is 100 times the root of 2 parameters: 141; so 20,000 steps.
    assert "gradient is 1 at most, and the noise of a step 1.4e+02" in found
    assert "after 20,000 steps" in found


def test_nothing_is_told_of_samples_that_are_not_called_public() -> None:
    model = nn.Linear(WIDTH, 1)

    assert obstacles_of(model, data_is_public=False, bound=1e3, noise=1e4) == ()


def test_an_adapter_whose_b_is_frozen_at_zero() -> None:
    model = Lora(trains_b=False)
    model.base.bias.requires_grad_(requires_grad=True)  # alone it is seen that nothing is learned
    said = "B.weight is zero and frozen, so what it is multiplied with learns nothing"

    optimizer = make_optimizer(model)

    assert check(model, losses_of, data(), optimizer).obstacles == (said,)
    assert LearningMonitor(model, optimizer).obstacles == [said]


def test_an_adapter_of_two_zero_matrices() -> None:
    first, second = obstacles_of(Lora(draws_a=False))

    assert first == "A.weight is zero, and so is its gradient, so nothing but noise moves it"
    assert second.startswith("B.weight is zero")


class Characters(nn.Module):
    """A causal model that sees one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens_BT):
        return self.head(self.embed(tokens_BT))


def shifted_losses(shift: int):
    def losses_of(model, tokens_BT):
        logits = model(tokens_BT)[:, : tokens_BT.size(1) - shift].transpose(1, 2)
        labels = tokens_BT[:, shift:]
        return functional.cross_entropy(logits, labels, reduction="none").mean(1)

    return losses_of


@pytest.mark.parametrize(
    ("shift", "said"),
    [(0, ["the token itself, so the model learns to copy"]), (1, []), (2, ["shifted twice"])],
)
def test_labels_that_are_not_shifted_are_named(shift, said) -> None:
    torch.manual_seed(0)
    model, tokens_BT = Characters(), torch.randint(9, (8, 7))
    optimizer = make_optimizer(model)

    found = check(model, shifted_losses(shift), tokens_BT, optimizer, data_is_public=True)

    assert len(found.obstacles) == len(said)
    assert all(one in told for one, told in zip(said, found.obstacles, strict=True))


def train(private, steps, *, model, rate=0.1, planned=None):
    """Train a line on data that it can fit, with dpprof or with Opacus."""
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    width = next(model.parameters()).size(1)
    loader = DataLoader(TensorDataset(*data(width)), batch_size=32, shuffle=True)
    made = private(model, sgd, loader)
    model, optimizer, loader = made
    with LearningMonitor(
        getattr(model, "_module", model), optimizer, every=10, steps=planned
    ) as monitor:
        while steps:
            for batch in loader:
                losses = losses_of(model, *batch)
                if hasattr(optimizer, "backward"):
                    optimizer.backward(losses)
                else:
                    losses.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps -= 1
                if not steps:
                    break
    return monitor


def by_dpprof(noise):
    settings = {"max_grad_norm": 1.0, "noise_multiplier": noise, "check": False}
    generators = {
        f"{name}_generator": torch.Generator().manual_seed(seed)
        for seed, name in enumerate(("sampling", "noise"))
    }
    return lambda *parts: make_private(*parts, **settings, **generators)


def by_opacus(noise):
    def make(model, optimizer, loader):
        return PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            noise_generator=torch.Generator().manual_seed(0),
        )

    return make


@pytest.mark.parametrize("make", [by_dpprof, by_opacus])
def test_the_monitor_tells_noise_from_a_training_that_learns(make, caplog) -> None:
    torch.manual_seed(0)
    learning = train(make(1.0), 20, model=nn.Linear(WIDTH, 1))
    noise = train(make(1e4), 20, model=nn.Linear(2_000, 1), planned=20)

    # The noise of a step is 1 / 32 in each of 7 numbers, and the mean clipped gradient nearly 1.
    assert learning.obstacles == []
    assert 3 < learning.signal < 1 / (7**0.5 / 32)
    (said,) = noise.obstacles
    # Three deviations of the mean of 10 squared norms of 2,001 numbers are 0.03 of it: 33 steps,
    # were that mean what is expected; it is within two deviations.
    after = re.search(r"far below the noise: .* after (\d+) steps at the earliest", said)
    assert 1 / (5 / 3 * 0.03) < int(after[1]) <= 33
    assert caplog.messages.count(said) == 1


def test_what_few_steps_do_not_show_is_not_said() -> None:
    assert train(by_dpprof(1e4), 20, model=nn.Linear(2_000, 1), planned=100).obstacles == []


def test_the_monitor_names_weights_that_rest() -> None:
    (said,) = train(by_dpprof(1.0), 10, model=nn.Linear(WIDTH, 1), rate=0.0).obstacles
    assert said == "the learning rate of weight and 1 more is 0"

    (said,) = train(by_dpprof(1.0), 10, model=nn.Linear(WIDTH, 1), rate=1e-12).obstacles
    assert said.startswith("weight and 1 more did not change in 10 steps: changes are lost")


def test_the_monitor_leaves_correlated_noise_alone() -> None:
    def make(*parts):
        settings = {"max_grad_norm": 1.0, "noise_multiplier": 1e4, "check": False}
        return make_private(*parts, noise="banded", bands=2, folds=2, steps=20, **settings)

    monitor = train(make, 20, model=nn.Linear(WIDTH, 1))

    assert (monitor.signal, monitor.obstacles) == (None, [])


@pytest.mark.parametrize("key", ["every", "steps"])
def test_the_monitor_refuses_no_steps(key) -> None:
    model = nn.Linear(WIDTH, 1)

    with pytest.raises(ValueError, match=f"{key} must be at least 1 step, and is 0"):
        LearningMonitor(model, make_optimizer(model), **{key: 0})


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_for_a_loss_of_transformers_which_shifts_them_itself(shift) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_hidden_layers=1, **sizes))
    tokens_BT = torch.randint(9, (8, 7))
    batch = (tokens_BT[:, : 7 - shift], tokens_BT[:, shift:])

    def losses_of(model, inputs_BT, labels_BT):
        pairs = zip(model(inputs_BT).logits.split(1), labels_BT.split(1), strict=True)
        return torch.stack([model.loss_function(*pair, vocab_size=9) for pair in pairs])

    found = check(model, losses_of, batch, make_optimizer(model), data_is_public=True)

    assert [one.partition(":")[0] for one in found.obstacles] == [
        "labels are shifted twice"
    ] * shift
