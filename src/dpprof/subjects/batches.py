"""Makes the batches that are trained on: random tokens, images and labels, as a task needs them.

Shape legend: B batch, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import UNLABELLED
from dpprof.subjects.methods.training_step import Batch
from dpprof.subjects.models.with_losses import WithLosses

Layer = TypeVar("Layer", bound=nn.Module)

MASKED = 0.15
"""The share of tokens that a masked language model has to find (Devlin et al. 2019, "BERT")."""


def make_batch(model: nn.Module, device: torch.device, experiment: Experiment) -> Batch:
    """Return a batch of random samples on the device, so no step waits for data.

    Tokens are uniform, and the vocabulary's size is that of the model's first embedding. Pixels are
    normal, in as many channels as its first convolution takes, and in 3 where it has none. Classes
    are uniform, and as many as its last linear layer tells apart. A Hugging Face model that reads
    text gets a mask; a sample shorter than ``seq_len`` is padded, and padding has no labels.

    A ``WithLosses`` brings its own.

    Raises:
        UnsupportedError: The model has no such layer, or brings fewer samples.
    """
    own = next((module for module in model.modules() if isinstance(module, WithLosses)), None)
    if own is not None:
        first, *others = own.take(experiment.batch_size, _dtype_of_numbers(experiment), device)
        return Batch(first, first.flatten(1)[:, 0] if first.dim() > 1 else first, others=(*others,))
    if experiment.image_size is not None:
        images = _draw_images(model, experiment, device)
        return replace(images, gives_labels=experiment.loss == "labels")
    batch = _draw_text(model, experiment, device)
    if not isinstance(experiment.model, Architecture):
        return batch
    batch = _pad(batch, experiment, model)
    return replace(batch, gives_labels=experiment.loss == "labels")


def _draw_images(model: nn.Module, experiment: Experiment, device: torch.device) -> Batch:
    assert experiment.image_size is not None
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    channels = 3 if first is None else first.in_channels
    count = experiment.batch_size
    shape = (count, channels, experiment.image_size, experiment.image_size)
    pixels = torch.randn(shape, dtype=_dtype_of_numbers(experiment)).to(device)
    return Batch(pixels, _draw(_count_classes(model), (count,), device))


def _dtype_of_numbers(experiment: Experiment) -> torch.dtype:
    return torch.float64 if experiment.dtype == "float64" else torch.float32


def _draw_text(model: nn.Module, experiment: Experiment, device: torch.device) -> Batch:
    """Return ids and labels, and the ids that a decoder gets beside an encoder."""
    first = _find_layers(model, nn.Embedding, "first one gives the vocabulary's size")[0]
    task, count, vocabulary = experiment.task, experiment.batch_size, first.num_embeddings
    shape = count, experiment.seq_len
    if task in ("causal-lm", "seq2seq-lm"):
        of_decoder = experiment.decoder_len or experiment.seq_len
        drawn = _draw(vocabulary, (count, of_decoder + 1), device)
        inputs, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        if task == "causal-lm" and experiment.loss == "labels":
            labels = inputs.clone()  # which the model shifts itself
        if task == "causal-lm":
            return Batch(inputs, labels)
        return Batch(_draw(vocabulary, shape, device), labels, decoder_BT=inputs)
    tokens_BT = _draw(vocabulary, shape, device)
    if task == "masked-lm":
        is_masked = torch.rand(shape).to(device) < MASKED
        is_masked[:, 0] = True  # so that each sample has a label
        labels = tokens_BT.masked_fill(~is_masked, UNLABELLED)
        return Batch(tokens_BT.masked_fill(is_masked, vocabulary - 1), labels)
    if task == "question-answering":
        return Batch(tokens_BT, _draw(experiment.seq_len, (count, 2), device))
    labelled = (count,) if task == "sequence-classification" else shape
    return Batch(tokens_BT, _draw(_count_classes(model), labelled, device))


def _draw(bound: int, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.randint(bound, tuple(shape)).to(device)


def _pad(batch: Batch, experiment: Experiment, model: nn.Module) -> Batch:
    """Return the batch with a mask, and with padding where a sample is shorter.

    Padding has the id that the config says, by which a class is found to be that of the last token.
    """
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    padding_id = getattr(config, "pad_token_id", None)
    if not isinstance(padding_id, int) or padding_id < 0:
        padding_id = 0
    device = batch.x.device
    batch = batch.map(Tensor.clone)  # of one sample ids and labels would share memory
    mask_BT = torch.ones_like(batch.x)
    lengths = experiment.sample_lengths(len(batch.x))
    if min(lengths) < experiment.seq_len:
        columns = torch.arange(experiment.seq_len, device=device)
        is_padding = columns >= torch.tensor(lengths, device=device)[:, None]
        batch.x.masked_fill_(is_padding, padding_id)
        if batch.labels.dim() > 1 and experiment.task != "question-answering":
            batch.labels.masked_fill_(is_padding, UNLABELLED)
        mask_BT.masked_fill_(is_padding, 0)
    return Batch(batch.x, batch.labels, mask_BT, batch.decoder_BT)


def _count_classes(model: nn.Module) -> int:
    return _find_layers(model, nn.Linear, "last one gives the number of classes")[-1].out_features


def _find_layers(model: nn.Module, kind: type[Layer], why: str) -> list[Layer]:
    layers = [layer for layer in model.modules() if isinstance(layer, kind)]
    if not layers:
        raise UnsupportedError(f"the model has no torch.nn.{kind.__name__}, and the {why}")
    return layers
