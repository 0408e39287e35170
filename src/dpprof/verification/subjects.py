"""What methods are tried on: a small model with a batch, and the samples' own gradients.

The model is a small one of the same layer types, its weights moved away from where they
start, since some gradients are too regular there to tell methods apart. Bounds lie
between the samples' norms, so that some samples are clipped and some are not.

Shape legend: B batch, T tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpprof.devices.cpu import Cpu
from dpprof.instruments.setup import make_batch
from dpprof.methods.training_step import UNLABELLED, Batch
from dpprof.models.build import build_model
from dpprof.models.dtype import apply_dtype
from dpprof.records.verdict import BUILT_IN, Scenario
from dpprof.spec.experiment import Dimensions, Experiment
from dpprof.spec.registry import UnsupportedError
from dpprof.verification import reference

REDUCED = Dimensions(vocab_size=11, d_model=12, layers=2, heads=3)
"""So few tokens that most sequences repeat one, which norms of embeddings must get right."""

SEQ_LEN = 9


class Subject(NamedTuple):
    """What is trained, and what is known of it."""

    experiment: Experiment
    model: nn.Module
    batch: Batch
    samples: Sequence[Tensor]
    """Of the samples, the gradients before clipping, as the reference has them."""


def describe(model: str, method: str, attention: str, batch_size: int) -> Experiment:
    """Describe the experiment in which a method is tried; its bound comes from ``prepare``."""
    return Experiment.model_validate(
        {
            "model": REDUCED if model == BUILT_IN else model,
            "method": method,
            "batch_size": batch_size,
            "seq_len": SEQ_LEN,
            "dtype": "float64",
            "attention": attention,
            "device": "cpu",
            "noise_multiplier": 0.0,
        }
    )


def prepare(experiment: Experiment, scenario: Scenario = "plain") -> Subject:
    """Make what a method is tried on, with a bound that suits it.

    Args:
        experiment: What to build.
        scenario: ``frozen`` and ``ignored labels`` change the model and the batch.

    Raises:
        UnsupportedError: The model cannot be had in this way.
    """
    torch.manual_seed(experiment.seed)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu")).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # or no two passes would compute the same
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim else 1
            parameter.add_(torch.randn_like(parameter) * width**-0.5)
    batch = make_batch(model, Cpu(), experiment.batch_size, experiment.seq_len)
    if scenario == "frozen":
        for parameter in choose_frozen(model):
            parameter.requires_grad_(False)
    elif scenario == "ignored labels":
        batch = ignore_labels(batch)
    samples = reference.sample_gradients(model, *batch)
    bound = choose_bound(torch.cat(samples, 1).norm(dim=1))
    return Subject(experiment.model_copy(update={"max_grad_norm": bound}), model, batch, samples)


def choose_bound(norms_B: Tensor) -> float:
    """Choose a bound between the norms, so that some are clipped; of one sample, that it is."""
    if len(norms_B) == 1:
        return float(norms_B) / 2
    return float(norms_B.min() + norms_B.max()) / 2


def choose_frozen(model: nn.Module) -> list[nn.Parameter]:
    """Choose what is frozen: one parameter in five, so that there are some of every kind.

    Raises:
        UnsupportedError: The model has too few.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if len(trainable) == 1:
        raise UnsupportedError("the model has only one parameter, which cannot be frozen")
    return trainable[1::5]


def choose_layer(model: nn.Module) -> nn.Module:
    """Choose a layer that is frozen as a whole: the last that has parameters of its own.

    Raises:
        UnsupportedError: There is no other.
    """
    owners = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
    if len(owners) == 1:
        raise UnsupportedError("the model has only one layer, which cannot be frozen")
    return owners[-1]


def ignore_labels(batch: Batch) -> Batch:
    """Leave each sample with another number of labels, and the last sample with one alone."""
    B, T = batch.labels_BT.shape
    labels_BT = batch.labels_BT.clone()
    for row in range(B):
        labels_BT[row, : T - 1 if row == B - 1 else row + 1] = UNLABELLED
    return Batch(batch.tokens_BT, labels_BT)
