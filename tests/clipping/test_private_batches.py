"""``make_private`` takes batches of any structure and losses that draw, and is checked."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from one_call import D, Model, prepare, seeded
from torch import Tensor
from torch.utils.data import Dataset

from dpprof.private import WrongTrainingError, check


@dataclass
class Points:
    x: Tensor
    names: list[str]
    y: Tensor


class Records(Dataset):
    """Records with tensors, words and nothing; each is augmented as it is read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at):
        shift = torch.rand(()) + np.random.rand()  # noqa: NPY002 (as users augment)
        x = torch.randn(D, generator=seeded(at), dtype=torch.float64) + shift
        return {"a": {"x": x}, "y": x.sum(), "name": str(at), "nothing": None}


def collate(records):
    x = torch.stack([one["a"]["x"] for one in records])
    return {
        "a": {"x": x},
        "names": [one["name"] for one in records],
        "nothing": None,
        "y": torch.stack([one["y"] for one in records]),
    }


def as_object(records):
    batch = collate(records)
    return Points(batch["a"]["x"], batch["names"], batch["y"])


def noisy(model, x, y):
    return model.losses(x + 0.1 * torch.randn_like(x), y)


def by_name(model):
    return lambda a, names, nothing, y: noisy(model, a["x"], y)  # noqa: ARG005


def whole(model):
    return lambda batch: noisy(model, batch["a"]["x"], batch["y"])


def of_object(model):
    return lambda batch: noisy(model, batch.x, batch.y)


WAYS = {
    "by name": (collate, by_name, lambda losses_of, batch: losses_of(**batch)),
    "whole": (collate, whole, lambda losses_of, batch: losses_of(batch)),
    "object": (as_object, of_object, lambda losses_of, batch: losses_of(batch)),
}


def make(way, **options):
    fold, losses_of, call = WAYS[way]
    model = Model().double()
    losses_of = losses_of(model)
    loader = load_records(collate_fn=fold)
    private = prepare(model, data_loader=loader, losses_of=losses_of, delta=1e-2, **options)
    return private, losses_of, call, next(iter(loader))


def load_records(**options):
    return torch.utils.data.DataLoader(Records(), batch_size=4, shuffle=True, **options)


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("way", WAYS)
def test_batches_train_as_they_are_and_the_optimizer_is_checked(way, most) -> None:
    private, losses_of, call, batch = make(way, max_batch_size=most)
    model, optimizer, loader = private
    empty = 0
    for _ in range(4):
        for one in loader:
            empty += optimizer._part.is_empty
            optimizer.backward(call(losses_of, one))
            optimizer.step()
            optimizer.zero_grad()
    assert empty

    steps, spent = optimizer.steps, private.epsilon_spent()
    parts = iter(loader)
    part = next(parts)  # is under way

    def named(_, **given):
        return losses_of(**given)

    def one(_, given):
        return losses_of(given)

    found = check(model, named if way == "by name" else one, batch, optimizer)
    assert {
        "each sample's loss is its own",
        "the gradient is that of single samples, clipped",
        "an empty batch contributes nothing",
    } <= set(found.checked)
    assert any(one.startswith("noise of the right scale") for one in found.checked)
    assert (optimizer.steps, private.epsilon_spent()) == (steps, spent)
    optimizer.backward(call(losses_of, part))
    optimizer.step()


def test_a_step_of_ones_own_is_checked_with_its_optimizer() -> None:
    private, losses_of, _, batch = make("whole")
    model, optimizer, _ = private

    def step(given):
        optimizer.zero_grad()
        optimizer.backward(losses_of(given))
        optimizer.step()

    def forgetful(given):
        optimizer.backward(losses_of(given))
        optimizer.step()

    def loss(_, given):
        return losses_of(given)

    assert check(model, loss, batch, optimizer, step=step).max_relative_error < 1e-5
    with pytest.raises(WrongTrainingError, match=r"call optimizer\.zero_grad\(\) after each step"):
        check(model, loss, batch, optimizer, step=forgetful)


def test_the_budget_does_not_end_a_check() -> None:
    private, losses_of, call, batch = make("whole", noise_multiplier=None, epsilon=8.0, steps=1)
    for one in private.data_loader:
        private.optimizer.backward(call(losses_of, one))
        private.optimizer.step()
        break
    found = check(private.model, lambda _, given: losses_of(given), batch, private.optimizer)

    assert found.samples == 4
    assert private.optimizer.planned_steps == 1


def test_mixed_samples_of_nested_batches_are_found() -> None:
    model = Model().double()

    def losses_of(batch):
        x = batch["a"]["x"]
        return noisy(model, x - x.mean(0), batch["y"])

    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        prepare(model, data_loader=load_records(collate_fn=collate), losses_of=losses_of)


def test_training_draws_what_it_would_have_drawn_without_the_check() -> None:
    drawn = []
    for is_checked in (True, False):
        model = Model().double()
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002 (as users augment)
        losses_of = whole(model)
        loader = load_records(collate_fn=collate)
        prepare(model, data_loader=loader, losses_of=losses_of, check=is_checked)
        drawn.append((torch.rand(()).item(), np.random.rand()))  # noqa: NPY002
    assert drawn[0] == drawn[1]
