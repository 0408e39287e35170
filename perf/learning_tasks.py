"""Three tasks with data that come with Python and scikit-learn, and models small enough for a CPU.

B samples, T characters, d the model's width.
"""

import importlib
import inspect
import math
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from learning_plan import Settings, Task

T, WIDTH, LAYERS, HEADS, RANK = 32, 32, 2, 2, 4
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
SOURCES = ("inspect", "typing", "_pydecimal")
"""Modules of the standard library whose source code is a text."""

HELD_OUT = 0.2
"""The share of samples that no training sees."""

PRETRAINING = {"steps": 600, "batch_size": 128, "learning_rate": 0.003}


class Data(NamedTuple):
    """Samples to train on, and others to measure on."""

    train: TensorDataset
    held_out: TensorDataset


def load_data(task: Task) -> Data:
    """Load a task's data; the same samples are held out in every run."""
    if task == "digits":
        digits = importlib.import_module("sklearn.datasets").load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        return _split(images, torch.tensor(digits.target))
    documentation = "".join(topics.topics[name] for name in sorted(topics.topics))
    source = "".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES)
    pieces = _cut(documentation if task == "characters" else source)
    return _split(pieces[:, :-1], pieces[:, 1:])


def _cut(text: str) -> Tensor:
    """Cut a text into pieces of T + 1 characters, as numbers; others than LETTERS are left out."""
    places = {letter: place for place, letter in enumerate(LETTERS)}
    codes = torch.tensor([places[letter] for letter in text if letter in places])
    return codes[: len(codes) // (T + 1) * (T + 1)].view(-1, T + 1)


def _split(inputs: Tensor, labels: Tensor) -> Data:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    # A whole number of batches: Opacus's sampling rate is one over their number.
    kept = int(len(inputs) * (1 - HELD_OUT)) // 256 * 256
    parts = (order[:kept], order[kept:])
    return Data(*(TensorDataset(inputs[part], labels[part]) for part in parts))


class Gpt(nn.Module):
    """A causal model of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(T, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits, of (B, T) as (B, letters, T)."""
        places = torch.arange(characters.size(1)).expand_as(characters)
        x_BTd = self.embed(characters) + self.places(places)
        for block in self.blocks:
            x_BTd = block(x_BTd)
        logits: Tensor = self.head(self.norm(x_BTd))
        return logits.transpose(1, 2)


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_BTd: Tensor) -> Tensor:
        """Return what the next block reads."""
        B, length, d = x_BTd.shape
        parts = self.qkv(self.norms[0](x_BTd)).view(B, length, 3, HEADS, d // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTd = x_BTd + self.out(heard.transpose(1, 2).reshape(B, length, d))
        below = functional.relu(self.up(self.norms[1](x_BTd)))
        return x_BTd + self.down(below)  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank (LoRA, Hu et al. 2021); B begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Linear(base.in_features, RANK, bias=False)
        self.B = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x_BTd: Tensor) -> Tensor:
        """Return the layer's output and the adapter's."""
        return self.base(x_BTd) + 2 * self.B(self.A(x_BTd))  # type: ignore[no-any-return]


def build_model(task: Task, settings: Settings, pretrained: Path | None) -> nn.Module:
    """Build a task's model, with the weights that torch's generator draws."""
    if task == "digits":
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )
    model = Gpt()
    if task == "adapters":
        assert pretrained is not None
        model.load_state_dict(torch.load(pretrained, weights_only=True))
        if settings.trained == "adapters":
            model.requires_grad_(requires_grad=False)
            for block in model.blocks:
                for name in ("qkv", "out", "up", "down"):
                    setattr(block, name, Adapted(getattr(block, name)))
    return model


def make_optimizer(task: Task, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Make the task's optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if task == "digits":
        return torch.optim.SGD(trained, lr=rate, momentum=0.9)
    return torch.optim.Adam(trained, lr=rate)


def losses_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Compute each sample's loss, the mean over its characters."""
    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
    return losses if losses.dim() == 1 else losses.mean(1)


METRICS: dict[Task, str] = {
    "digits": "accuracy",
    "characters": "bits per character",
    "adapters": "bits per character",
}


@torch.no_grad()
def measure(task: Task, model: nn.Module, data: TensorDataset) -> float:
    """Measure a model on samples: the share of right digits, or bits per character."""
    inputs, labels = data.tensors
    if task == "digits":
        right: Tensor = model(inputs).argmax(1) == labels
        return right.double().mean().item()
    places = torch.arange(len(inputs)).tensor_split(8)
    losses = torch.cat([losses_of(model, inputs[part], labels[part]) for part in places])
    return losses.double().mean().item() / math.log(2)


def pretrain() -> dict[str, Tensor]:
    """Train a GPT on Python's documentation without privacy, always in the same way."""
    torch.manual_seed(0)
    model, data = Gpt(), load_data("characters").train
    adam = torch.optim.Adam(model.parameters(), lr=PRETRAINING["learning_rate"])
    for _ in range(int(PRETRAINING["steps"])):
        chosen = torch.randint(len(data), (int(PRETRAINING["batch_size"]),))
        adam.zero_grad()
        losses_of(model, *data[chosen]).mean().backward()  # type: ignore[no-untyped-call]
        adam.step()
    return model.state_dict()
