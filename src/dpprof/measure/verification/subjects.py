"""The subjects of verification: a small model with a batch, and the samples' gradients.

Weights are moved away from their initial values, where some gradients are too regular to
distinguish methods. Bounds lie between the samples' norms, so some samples are clipped and some are
not.

Shape legend: B batch, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import Dimensions
from dpprof.experiments.config.tasks import OWN_IMAGE_SIZES
from dpprof.experiments.planning.stand_ins import StandIn, shrink
from dpprof.experiments.records.verdict import BUILT_IN, Scenario
from dpprof.measure.verification import reference
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import UNLABELLED
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.training_step import Batch
from dpprof.subjects.models.build import apply_dtype, build_model

REDUCED = Dimensions(vocab_size=11, d_model=12, layers=2, heads=3)
"""Its vocabulary is so small that most sequences repeat a token, a hard case for embeddings."""

SEQ_LEN = 9

IMAGE_SIZE = 32
"""Height and width of the images of dpprof's own models. A vision transformer makes four
patches."""


class Subject(NamedTuple):
    """A model with a batch, an experiment, and the reference's gradients."""

    experiment: Experiment
    model: nn.Module
    batch: Batch
    samples: Sequence[Tensor]  # the reference's gradients of the samples before clipping


def describe_case(model: str | StandIn, method: str, attention: str, batch_size: int) -> Experiment:
    """Return the experiment of a case; ``prepare`` sets its bound.

    Raises:
        UnsupportedError: transformers refuses the config of a stand-in.
    """
    if isinstance(model, StandIn):
        described = model.model_dump(exclude_none=True, exclude={"model"})
        described["model"] = _complete(model.model)
    else:
        described = {"model": REDUCED if model == BUILT_IN else model}
    return Experiment.model_validate(
        {
            **described,
            "method": method,
            "batch_size": batch_size,
            **_choose_size(described["model"]),
            "dtype": "float64",
            "attention": attention,
            "device": "cpu",
            "noise_multiplier": 0.0,
        }
    )


def _choose_size(model: Any) -> dict[str, int]:
    """Return the size of samples; that of a Hugging Face model's images is in its config."""
    if isinstance(model, Architecture) and model.image_size is not None:
        return {}
    if isinstance(model, str) and OWN_IMAGE_SIZES.get(model) is not None:
        return {"image_size": IMAGE_SIZE}
    return {"seq_len": SEQ_LEN}


def _complete(architecture: Architecture) -> Architecture:
    """Return an architecture whose sizes are all small, also those that its config leaves out.

    Raises:
        UnsupportedError: transformers has no class for its task, or refuses it.
    """
    import transformers  # noqa: PLC0415 (an extra)

    from dpprof.subjects.models.hugging_face import read_config  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    whole: dict[str, Any] = read_config(architecture).to_dict()
    small = shrink(whole)
    if any("experts" in name for name in whole):
        # The other implementations of experts know no float64, or none of torch.func's transforms.
        small["experts_implementation"] = "eager"
    changed = {name: value for name, value in small.items() if value != whole.get(name)}
    return Architecture(**(architecture.model_dump() | changed))


def prepare(experiment: Experiment, scenario: Scenario = "plain") -> Subject:
    """Return a subject with a suitable bound; some scenarios change its model or its batch.

    Raises:
        UnsupportedError: The model does not support the experiment or the scenario.
    """
    torch.manual_seed(experiment.seed)
    model = build_model(experiment, is_reduced=True)
    model = apply_dtype(model, experiment, torch.device("cpu")).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # so that all passes compute the same
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim else 1
            parameter.add_(torch.randn_like(parameter) * width**-0.5)
    batch = make_batch(model, torch.device("cpu"), experiment)
    if scenario == "frozen":
        for parameter in choose_frozen(model):
            parameter.requires_grad_(False)
    elif scenario == "ignored labels":
        batch = ignore_labels(batch)
    samples = reference.sample_gradients(model, batch.inputs, batch.labels)
    if scenario == "other padding":
        batch = replace_padding(batch)
        changed = reference.sample_gradients(model, batch.inputs, batch.labels)
        if not all(map(torch.allclose, changed, samples)):
            raise RuntimeError("the model's own gradient depends on the tokens of padding")
    norms_B = torch.cat(samples, 1).norm(dim=1)
    # Between the norms, so that some are clipped; a single sample is clipped.
    bound = float(norms_B.min() + norms_B.max()) / (2 if len(norms_B) > 1 else 4)
    return Subject(experiment.model_copy(update={"max_grad_norm": bound}), model, batch, samples)


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
    """Return a layer to freeze as a whole: the last with parameters of its own that are trained.

    Raises:
        UnsupportedError: The model has only one such layer.
    """
    owners = [
        layer
        for layer in model.modules()
        if any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    ]
    if len(owners) == 1:
        raise UnsupportedError("the model has only one layer, which cannot be frozen")
    return owners[-1]


def ignore_labels(batch: Batch) -> Batch:
    """Return the batch with fewer labels in each sample, and one in the last.

    Raises:
        UnsupportedError: Samples have classes.
    """
    labels = batch.labels.clone()
    if labels.dim() == 1:
        raise UnsupportedError("each sample has one label, which cannot be ignored")
    for row, labels_T in enumerate(labels):
        labelled = (labels_T != UNLABELLED).nonzero().flatten()
        least = len(labelled) if row == len(labels) - 1 else row + 2
        labels_T[labelled[: min(least, len(labelled)) - 1]] = UNLABELLED
    return replace(batch, labels=labels)


def replace_padding(batch: Batch) -> Batch:
    """Return the batch with other tokens as padding.

    Raises:
        UnsupportedError: The batch has no padding.
    """
    if batch.mask_BT is None or bool(batch.mask_BT.all()):
        raise UnsupportedError("the batch has no padding")
    return replace(batch, x=torch.where(batch.mask_BT == 1, batch.x, batch.x.max()))
