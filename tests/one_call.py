"""A small private training by ``make_private``, right or as a test wants it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import PrivateTraining, make_private

SAMPLES, BATCH, D = 24, 6, 5


class Model(nn.Module):
    """A model that fails on a batch without samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 1))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute one loss for each sample."""
        if not len(x):
            raise ValueError("no samples")
        return (self.layers(x)[:, 0] - y).square()


def load(**options: Any) -> DataLoader[Any]:
    """Load inputs and targets, shuffled."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, D, generator=generator, dtype=torch.float64)
    options = {"batch_size": BATCH, "shuffle": True} | options
    return DataLoader(TensorDataset(x, x.sum(1)), **options)


def seeded(number: int) -> torch.Generator:
    """Make a generator with a seed."""
    return torch.Generator().manual_seed(number)


def prepare(model: Model, **options: Any) -> PrivateTraining:
    """Make it private, with settings that the options replace."""
    given = {"max_grad_norm": 0.5, "noise_multiplier": 1.0, "sampling_generator": seeded(2)}
    given |= {"noise_generator": seeded(3)} | options
    given = {
        "optimizer": None,
        "data_loader": None,
        "losses_of": getattr(model, "losses", None),
    } | given
    names = ("optimizer", "data_loader", "losses_of")
    optimizer, loader, losses_of = (given.pop(name) for name in names)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = load() if loader is None else loader
    return make_private(model, optimizer, loader, losses_of, **given)


def train(private: Any, model: Model, epochs: int = 2) -> int:
    """Train in an ordinary loop; returns how many parts there were."""
    parts = 0
    _, optimizer, loader = private
    for _ in range(epochs):
        for batch in loader:
            optimizer.backward(model.losses, *batch)
            optimizer.step()
            optimizer.zero_grad()
            parts += 1
    return parts


def weights(model: nn.Module) -> Tensor:
    """Join all parameters."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def find_names(state: Any) -> set[str]:
    """Return all names in nested dictionaries and lists."""
    if isinstance(state, dict):
        return {*map(str, state), *(name for one in state.values() for name in find_names(one))}
    parts = state if isinstance(state, list | tuple) else []
    return {name for one in parts for name in find_names(one)}


def scheduled_weights() -> tuple[Tensor, list[float], int]:
    """Train on ranks, with a schedule; returns the weights, the rate of each step, and parts."""
    model = Model().double()
    replica = nn.parallel.DistributedDataParallel(model.layers)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    rates: list[float] = []
    sgd.register_step_pre_hook(lambda *_: rates.append(sgd.param_groups[0]["lr"]))
    settings = {"max_grad_norm": 0.5, "noise_multiplier": 1.0, "max_batch_size": 1, "check": False}
    _, optimizer, loader = make_private(
        replica, sgd, load(), sampling_generator=seeded(2), **settings
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    parts = 0
    for x, y in loader:
        optimizer.backward((replica(x)[:, 0] - y).square())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        parts += 1
    optimizer.clipping.remove()
    return weights(model), rates, parts
