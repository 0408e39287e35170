"""The audit: a bound by known answers, right trainings below their epsilon, wrong ones above."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from one_call import seeded
from small_models import take_step
from torch import nn
from torch.utils.data import DataLoader

from dpprof.private import PrivacyArguments, audit, make_private
from dpprof.private.checks.canaries import (
    MarkedSamples,
    WithCanaries,
    adding_up_releases,
    with_gradients,
)
from dpprof.private.checks.one_run import bound_epsilon, find_p_value

DATA = [(x, x.sum()) for x in torch.randn(20, 3, generator=torch.Generator().manual_seed(1))]
DELTA = 1e-5


def losses_of(model, x, y):
    return (model(x)[:, 0] - y).square()


def train(model, data, losses_of, *, steps=9, rate=1.0, told=None, **options):
    """Train by ``make_private``."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_size=round(rate * len(data)), shuffle=True)
    given = {"max_grad_norm": 0.5, "noise_multiplier": 3.0, "check": False} | options
    private = make_private(model, sgd, loader, partial(losses_of, model), **given)
    while private.optimizer.steps < steps:
        for batch in private.data_loader:
            take_step(private.optimizer, losses_of(model, *batch))
    return private if told is None else told


def run(train, *, seed=0, losses_of=losses_of, data=DATA, **options):
    return audit(
        *(nn.Linear(3, 1), losses_of, data, train),
        **{"delta": DELTA, "canaries": 1000, "generator": seeded(seed)} | options,
    )


@pytest.mark.parametrize(
    ("right", "guesses", "canaries"), [(9, 10, 12), (10, 10, 40), (5, 10, 10), (0, 7, 9)]
)
def test_the_probability_of_right_guesses_is_that_of_the_source(right, guesses, canaries) -> None:
    delta, odds = Fraction(1, 1000), 3

    def chance(count):
        ways = math.comb(guesses, count) if 0 <= count <= guesses else 0
        return Fraction(ways * odds ** max(count, 0), (1 + odds) ** guesses)

    beta = sum(chance(count) for count in range(right, guesses + 1))
    alpha = max(sum(chance(right - j) for j in range(1, i + 1)) / i for i in range(1, canaries + 1))
    expected = min(1, beta + 2 * canaries * delta * alpha)
    p_value = find_p_value(right, guesses, canaries, epsilon=math.log(odds), delta=float(delta))
    assert p_value == pytest.approx(float(expected), rel=1e-12)


def test_the_bound_of_guesses_that_are_all_right_is_that_of_a_formula() -> None:
    chance = 0.05 ** (1 / 100)
    bound = bound_epsilon(100, 100, 100, delta=0.0, significance=0.05)
    assert bound == pytest.approx(math.log(chance / (1 - chance)), rel=1e-9)
    assert bound_epsilon(55, 100, 100, delta=0.0, significance=0.05) == 0
    assert bound_epsilon(100, 100, 100, delta=0.1, significance=0.05) < bound


def test_a_canary_adds_the_bound_to_its_own_coordinate_of_what_is_released() -> None:
    coins = torch.arange(100) % 3 == 0
    model = WithCanaries(nn.Linear(3, 1), 100)
    own = with_gradients(losses_of, model.canaries)
    with adding_up_releases(model.canaries) as released:
        train(model, MarkedSamples(DATA, DATA, coins), own, steps=4, noise_multiplier=0.0)
    expected = 4 * 0.5 / 120 * coins.double()
    assert torch.allclose(released, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_canaries_have_numbers_that_hold_their_gradient(dtype) -> None:
    weight = WithCanaries(nn.Linear(3, 1).to(dtype), 100).canaries.weight
    assert weight.dtype == torch.promote_types(dtype, torch.float32)


def test_a_right_training_is_below_its_epsilon_and_one_that_tells_too_little_is_not() -> None:
    found = run(train)
    assert found.epsilon == pytest.approx(4.39, abs=0.01)  # of a Gaussian, 9 / 9 times
    assert found.epsilon / 6 < found.lower_bound < found.epsilon < found.most
    assert not found.exceeds
    assert "which this does not contradict. It is no proof" in str(found)

    assert run(partial(train, told=math.nan)).exceeds
    found = run(partial(train, told=0.5))
    assert found.exceeds
    assert str(found).startswith("NOT AS PRIVATE AS ITS ACCOUNTANT SAYS, which is epsilon 0.50")


def train_by_opacus(model, data, losses_of, noise=3.0):
    opacus = pytest.importorskip("opacus")
    engine = opacus.PrivacyEngine()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=sgd,
        data_loader=DataLoader(data, batch_size=len(data) // 2, shuffle=True),
        noise_multiplier=3.0,
        max_grad_norm=0.5,
    )
    optimizer.noise_multiplier = noise  # the accountant reads that at each step
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            losses_of(model, *batch).mean().backward()
            optimizer.step()
    return engine


@pytest.mark.filterwarnings("ignore")
def test_trainings_by_opacus_are_audited() -> None:
    found = run(train_by_opacus)
    assert 0.3 < found.lower_bound < found.epsilon

    def train_without_noise(model, data, losses_of):
        train_by_opacus(model, data, losses_of, noise=0.3)
        return 2.0

    assert run(train_without_noise).exceeds


def train_by_trainer(model, data, losses_of, *, noise=2.0):
    transformers = pytest.importorskip("transformers")
    from dpprof.private import PrivateTrainer  # noqa: PLC0415

    args = transformers.TrainingArguments(
        *("out",),
        per_device_train_batch_size=len(data) // 2,
        max_steps=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    privacy = PrivacyArguments(max_grad_norm=0.5, noise_multiplier=noise, check=False)
    given = {"model": model, "args": args, "train_dataset": data, "losses_of": losses_of}
    trainer = PrivateTrainer(**given, privacy=privacy)
    trainer.train()
    return trainer


def test_trainings_by_the_trainer_are_audited(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = [{"x": x, "y": y} for x, y in DATA]
    of_mapping = lambda model, inputs: losses_of(model, **inputs)  # noqa: E731
    found = run(train_by_trainer, losses_of=of_mapping, data=data)
    assert 0.3 < found.lower_bound < found.epsilon


def test_canaries_in_the_data_are_told_by_their_losses() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.eye(200)[:, None] * 5
    canaries = [(one[0], torch.randn((), generator=generator) * 3) for one in inputs]
    model = nn.Linear(200, 1)
    data = [(torch.zeros(200), torch.zeros(()))] * 4
    given = {"delta": DELTA, "canaries": canaries, "generator": seeded(1)}

    def memorise(model, data, losses_of):
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        batch = torch.utils.data.default_collate([data[at] for at in range(len(data))])
        for _ in range(40):
            sgd.zero_grad()
            losses_of(model, *batch).mean().backward()
            sgd.step()
        return 0.5

    found = audit(model, losses_of, data, memorise, **given)
    assert found.exceeds
    assert found.canaries == 200
    found = audit(model, losses_of, data, partial(train, steps=2), **given)
    assert found.lower_bound < found.epsilon


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 100 canaries, and there are 99"):
        run(train, canaries=99)
    with pytest.raises(ValueError, match="delta must lie between 0 and 1, and is 1"):
        run(train, delta=1)
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, and is 95"):
        run(train, confidence=95)
    with pytest.raises(ValueError, match=r"no step of a torch\.optim\.Optimizer released"):
        run(lambda *_: 1.0)
    with pytest.raises(TypeError, match="train returned a NoneType; it must return what tells"):
        run(lambda *given: train(*given, steps=1) and None)


@pytest.mark.slow
def test_right_trainings_are_below_their_epsilon_with_50_seeds() -> None:
    for seed in range(50):
        for rate, steps, noise in ((1.0, 9, 3.0), (0.1, 30, 1.0)):
            training = partial(train, rate=rate, steps=steps, noise_multiplier=noise)
            found = run(training, seed=seed)
            assert found.lower_bound < found.epsilon, found


@pytest.mark.slow
def test_the_bound_is_at_least_a_third_of_epsilon() -> None:
    """As in section 6 of the source: 5,000 canaries, Poisson batches, delta 1e-5."""
    training = partial(train, rate=0.1, steps=600, noise_multiplier=2.0)
    bounds = [run(training, seed=seed, canaries=5000) for seed in range(3)]
    print(*bounds, sep="\n")
    assert sum(found.lower_bound for found in bounds) / 3 >= bounds[0].epsilon / 3
