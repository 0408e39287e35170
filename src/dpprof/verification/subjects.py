"""The subjects of verification: a small model with a batch, and the samples' gradients.

Weights are moved away from their initial values, where some gradients are too regular to
distinguish methods. Bounds lie between the samples' norms, so some samples are clipped and some are
not.

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
"""Its vocabulary is so small that most sequences repeat a token, a hard case for embeddings."""

SEQ_LEN = 9


class Subject(NamedTuple):
    """A model with a batch, an experiment, and the reference's gradients."""

    experiment: Experiment
    model: nn.Module
    batch: Batch
    samples: Sequence[Tensor]
    """The reference's gradients of the samples before clipping."""


def describe(model: str, method: str, attention: str, batch_size: int) -> Experiment:
    """Return the experiment of a case; ``prepare`` sets its bound."""
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
    """Return a subject with a suitable bound; some scenarios change its model or its batch.

    Raises:
        UnsupportedError: The model does not support the experiment or the scenario.
    """
    torch.manual_seed(experiment.seed)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu")).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # so that all passes compute the same
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim else 1
            parameter.add_(torch.randn_like(parameter) * width**-0.5)
    batch = make_batch(model, Cpu(), experiment)
    if scenario == "frozen":
        for parameter in choose_frozen(model):
            parameter.requires_grad_(False)
    elif scenario == "ignored labels":
        batch = ignore_labels(batch)
    samples = reference.sample_gradients(model, batch.inputs, batch.labels_BT)
    bound = choose_bound(torch.cat(samples, 1).norm(dim=1))
    return Subject(experiment.model_copy(update={"max_grad_norm": bound}), model, batch, samples)


def choose_bound(norms_B: Tensor) -> float:
    """Return a bound between the norms, so that some are clipped; a single sample is clipped."""
    if len(norms_B) == 1:
        return float(norms_B) / 2
    return float(norms_B.min() + norms_B.max()) / 2


def choose_frozen(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters to freeze: every fifth, so that all kinds are among them.

    Raises:
        UnsupportedError: The model has only one parameter.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if len(trainable) == 1:
        raise UnsupportedError("the model has only one parameter, which cannot be frozen")
    return trainable[1::5]


def choose_layer(model: nn.Module) -> nn.Module:
    """Return a layer to freeze as a whole: the last with parameters of its own.

    Raises:
        UnsupportedError: The model has only one such layer.
    """
    owners = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
    if len(owners) == 1:
        raise UnsupportedError("the model has only one layer, which cannot be frozen")
    return owners[-1]


def ignore_labels(batch: Batch) -> Batch:
    """Return the batch with a different number of labels in each sample, and one in the last."""
    B, T = batch.labels_BT.shape
    labels_BT = batch.labels_BT.clone()
    for row in range(B):
        labels_BT[row, : T - 1 if row == B - 1 else row + 1] = UNLABELLED
    return batch._replace(labels_BT=labels_BT)
