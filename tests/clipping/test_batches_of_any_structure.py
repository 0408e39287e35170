"""``make_private``, ``check`` and ``PrivateTrainer`` take batches of any structure."""

import collections
import dataclasses
import random

import numpy as np
import pytest
import torch
from one_call import seeded
from small_models import take_step
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpprof.private import WrongTrainingError, check, make_private

SAMPLES, B = 12, 4
Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024 (as users write it)


class Data(Dataset):
    """Samples that draw as they are loaded, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int):
        source = seeded(at)
        scale = 1 + 0.1 * float(torch.rand(()))
        scale += 0.1 * random.random() + 0.1 * np.random.rand()  # noqa: S311, NPY002
        return scale * torch.randn(5, generator=source), torch.randn(3, generator=source), str(at)


@dataclasses.dataclass
class Batch:
    """What a user's collator makes."""

    x: Tensor
    y: Tensor
    names: list[str]


def of_dataclass(samples) -> Batch:
    x, y, names = zip(*samples, strict=True)
    return Batch(torch.stack(x), torch.stack(y), list(names))


def of_encoding(samples):
    transformers = pytest.importorskip("transformers")
    one = of_dataclass(samples)
    return transformers.BatchEncoding({"x": one.x, "y": one.y})


def nested(samples):
    one = of_dataclass(samples)
    return {"a": {"x": one.x, "none": None}, "y": one.y, "names": one.names}


def of_tuple(samples):
    one = of_dataclass(samples)
    return one.x, one.y, one.names, torch.ones(3)


def losses(model, x, y):
    assert len(x)  # as many models, it fails on a batch without samples
    return (model(x + torch.randn_like(x)) - y).square().mean(1)


CASES = {
    "a dataclass": (of_dataclass, lambda model, one: losses(model, one.x, one.y)),
    "a BatchEncoding": (of_encoding, lambda model, one: losses(model, one.x, one["y"])),
    "a BatchEncoding by name": (of_encoding, losses),
    "nested": (nested, lambda model, one: losses(model, one["a"]["x"], one["y"])),
    "nested by name": (nested, lambda model, a, y, names: losses(model, a["x"], y * len(names[0]))),
    "strings": (of_tuple, lambda model, x, y, _names, scale: losses(model, x * scale.mean(), y)),
    "a namedtuple": (
        lambda samples: Pair(*of_tuple(samples)[:2]),
        lambda model, one: losses(model, one.x, one.y),
    ),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def call(function, model, batch):
    """Call as a user's loop does."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return function(model, *batch)
    try:
        return function(model, batch)
    except TypeError:
        return function(model, **batch)


def privacy(**options):
    settings = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    return settings | {"sampling_generator": seeded(1), "noise_generator": seeded(2)} | options


def prepare(model, collate, losses_of, batch_size=B, **options):
    loader = DataLoader(Data(), batch_size=batch_size, shuffle=True, collate_fn=collate)
    settings = privacy(**{"max_batch_size": 3, "delta": 1e-3} | options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, sgd, loader, losses_of, **settings)


def of_model(function, model):
    """Return losses of the batch alone, which take it as the function does."""
    if function in (losses, CASES["nested by name"][1]):
        return lambda **batch: function(model, **batch)
    if function is CASES["strings"][1]:
        return lambda x, y, names, scale: function(model, x, y, names, scale)
    return lambda batch: function(model, batch)


def train(private, function, model) -> Tensor:
    torch.manual_seed(3)
    for batch in private.data_loader:
        take_step(private.optimizer, call(function, model, batch))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("kind", CASES)
def test_a_training_is_checked_and_trains_what_it_does_without(kind) -> None:
    """Also in batches without samples, of which there are some of twelve."""
    collate, function = CASES[kind]
    found = []
    for checks in (True, False):
        model = build()
        own = of_model(function, model)
        private = prepare(model, collate, own, batch_size=1, max_batch_size=None, check=checks)
        found.append(train(private, function, model))
        assert private.optimizer.steps == SAMPLES
    assert torch.equal(*found)


@pytest.mark.parametrize("at", [0, 1])
def test_the_optimizer_of_make_private_is_checked_within_its_loop(at) -> None:
    """Also between the parts of a batch, whose sums go on."""
    collate, function = CASES["nested"]
    found = []
    for checks in (True, False):
        model = build()
        options = {"check": False, "sampling_generator": seeded(5)}
        private = prepare(model, collate, of_model(function, model), **options)
        batch = collate([Data()[one] for one in range(5)])
        torch.manual_seed(3)
        for number, part in enumerate(private.data_loader):
            if checks and number == at:
                checked = check(model, function, batch, private.optimizer)
            take_step(private.optimizer, call(function, model, part))
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        assert private.spent.history == [(1.0, 1 / 3, 3)]
    assert torch.equal(*found)
    assert checked.samples == 5
    assert {
        "each sample's loss is its own",
        "the gradient is that of single samples, clipped",
        "an empty batch contributes nothing",
    } <= set(checked.checked)
    assert any(one.startswith("noise of the right scale") for one in checked.checked)


def test_a_spent_budget_does_not_keep_its_optimizer_from_a_check() -> None:
    model = build()
    function = CASES["a dataclass"][1]
    budget = {"noise_multiplier": None, "epsilon": 3.0, "epochs": 1, "accountant": "rdp"}
    private = prepare(model, of_dataclass, of_model(function, model), **budget)
    train(private, function, model)
    spent, optimizer = private.epsilon_spent(), private.optimizer
    batch = of_dataclass([Data()[at] for at in range(5)])
    checked = check(model, function, batch, optimizer)
    assert "an empty batch contributes nothing" in checked.checked

    def step(one) -> None:
        optimizer.zero_grad()
        optimizer.backward(function(model, one))
        optimizer.step()

    def step_by_clipping(one) -> None:
        optimizer.zero_grad()
        optimizer.clipping.backward(function(model, one))
        optimizer.step()

    def forget(one) -> None:
        optimizer.backward(function(model, one))
        optimizer.step()

    assert check(model, function, batch, optimizer, step=step).samples == 5
    for wrong, said in (
        (step_by_clipping, r"call backward\(losses\) of this optimizer"),
        (forget, r"call optimizer\.zero_grad\(\) after each step"),
    ):
        with pytest.raises(WrongTrainingError, match=said):
            check(model, function, batch, optimizer, step=wrong)
    assert private.epsilon_spent() == spent


def of_trainer(collate, losses_of, folder, model, **options):
    transformers = pytest.importorskip("transformers")
    from dpprof.private import PrivacyArguments, PrivateTrainer  # noqa: PLC0415

    settings = {"max_steps": 2, "use_cpu": True, "report_to": [], "optim": "sgd"}
    args = transformers.TrainingArguments(output_dir=str(folder), **settings)
    parts = {"train_dataset": Data(), "data_collator": collate, "losses_of": losses_of}
    parts["privacy"] = PrivacyArguments(**privacy(**options))
    return PrivateTrainer(model=model, args=args, **parts)


@pytest.mark.parametrize("kind", ["a dataclass", "a BatchEncoding", "nested"])
def test_a_trainer_checks_and_trains_on_any_structure(kind, tmp_path) -> None:
    collate, losses_of = CASES[kind]
    found = []
    for checks in (True, False):
        model = build()
        of_trainer(collate, losses_of, tmp_path, model, check=checks).train()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*found)

    def wrong(model, inputs):
        return losses_of(model, inputs) / losses_of(model, inputs).detach().sum()

    with pytest.raises(WrongTrainingError, match="mixes samples"):
        of_trainer(collate, wrong, tmp_path, build()).train()


def test_a_trainer_without_losses_refuses_inputs_without_labels(tmp_path) -> None:
    trainer = of_trainer(of_dataclass, None, tmp_path, build())
    with pytest.raises(TypeError, match=r"the inputs are a Batch, .*give PrivateTrainer losses_of"):
        trainer.compute_sample_losses(trainer.model, of_dataclass([Data()[0]]))
