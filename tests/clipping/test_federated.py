"""Federated rounds as Flower runs them: a client is made anew in each round, from its disk."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from one_call import seeded
from opacus.accountants import RDPAccountant
from small_models import take_step
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import make_private

SAMPLES, BATCH, ROUNDS, STEPS = 40, 10, 3, 2
BUDGET = {"epsilon": 2.0, "delta": 1e-3, "accountant": "rdp"}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


class Client:
    """What Flower's ``NumPyClient`` is: arrays in and out, and a number of samples, here public."""

    def __init__(self, number: int, folder: Path) -> None:
        x = torch.randn(SAMPLES, 3, generator=seeded(number))
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
        self.model, self.disk = build(), folder / f"client-{number}.pt"

    def get_parameters(self, _config) -> list[np.ndarray]:
        return [value.numpy().copy() for value in self.model.state_dict().values()]

    def set_parameters(self, parameters) -> None:
        names = self.model.state_dict()
        self.model.load_state_dict(dict(zip(names, map(torch.tensor, parameters), strict=True)))

    def losses_of(self, x, y):
        return cross_entropy(self.model(x), y, reduction="none")

    def fit(self, parameters, config):
        self.set_parameters(parameters)
        private = make_private(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.5),
            DataLoader(self.data, batch_size=BATCH),
            self.losses_of,
            max_grad_norm=1.0,
            steps=ROUNDS * STEPS,
            check=False,
            **BUDGET,
        )
        if self.disk.exists():
            private.spent.load_state_dict(torch.load(self.disk, weights_only=True))
        steps = 0
        while steps < config["steps"]:
            for batch in private.data_loader:
                take_step(private.optimizer, self.losses_of, *batch)
                torch.save(private.spent.state_dict(), self.disk)  # before anything is sent
                steps += 1
                if steps == config["steps"]:
                    break
        private.remove()
        spent = {"epsilon": private.epsilon_spent(), "history": private.spent.history}
        return self.get_parameters({}), SAMPLES, spent


class Server:
    """Averages what clients send, weighted by their numbers of samples, as FedAvg does."""

    def __init__(self, folder: Path, clients: int = 2) -> None:
        self.folder, self.clients = folder, clients
        self.parameters = Client(0, folder).get_parameters({})
        self.spent: list[dict] = []

    def run(self, rounds: int, steps: int = STEPS) -> None:
        for _ in range(rounds):
            sent = [
                Client(number, self.folder).fit(copy.deepcopy(self.parameters), {"steps": steps})
                for number in range(self.clients)
            ]
            total = sum(samples for _, samples, _ in sent)
            layers = zip(*(parameters for parameters, _, _ in sent), strict=True)
            weights = [samples / total for _, samples, _ in sent]
            self.parameters = [
                sum(w * one for w, one in zip(weights, layer, strict=True)) for layer in layers
            ]
            self.spent = [spent for _, _, spent in sent]


def test_one_account_counts_the_steps_of_all_rounds(tmp_path) -> None:
    server = Server(tmp_path)
    server.run(ROUNDS)

    for spent in server.spent:
        ((noise, rate, steps),) = spent["history"]
        assert (rate, steps) == (BATCH / SAMPLES, ROUNDS * STEPS)
        whole = RDPAccountant()
        whole.history = [(noise, rate, steps)]
        opacus = whole.get_epsilon(delta=BUDGET["delta"])
        assert spent["epsilon"] == pytest.approx(opacus, rel=1e-12)
        assert 0.95 * BUDGET["epsilon"] < spent["epsilon"] <= BUDGET["epsilon"]


def test_a_round_that_was_lost_counts_when_it_is_repeated(tmp_path) -> None:
    """A client dies after two steps: what it may have sent counts, and so does the repetition."""
    parameters = Server(tmp_path).parameters
    Client(0, tmp_path).fit(parameters, {"steps": 2})
    _, _, spent = Client(0, tmp_path).fit(parameters, {"steps": 2})
    assert sum(steps for *_, steps in spent["history"]) == 4
