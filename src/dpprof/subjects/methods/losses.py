"""The losses of a step: of logits, of a head that is computed in chunks, or the model's own.

Shape legend: B batch, T tokens, V vocabulary, d width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.loops import CHUNKS
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.linear_cross_entropy import linear_cross_entropy
from dpprof.private.layers.model_heads import KNOWN, Head, describe_head, hidden_states_of
from dpprof.private.layers.sample_losses import UNLABELLED, mean_over_labels, sample_losses
from dpprof.subjects.methods.training_step import TrainingStep
from dpprof.subjects.models.build import autocasting
from dpprof.subjects.models.quantized import is_quantized

_SHORT = (torch.bfloat16, torch.float16)


def losses_of(step: TrainingStep, labels_BT: Tensor, *inputs: Tensor) -> Tensor:
    """Run a step's model, and return each sample's loss.

    With ``head: chunked`` and ``kept`` the logits of some tokens exist at a time.

    Returns:
        (B,); 0 for a sample without labels. A scalar where the model has computed the mean.
    """
    experiment = step.experiment
    if experiment.head == "logits" and experiment.loss != "chunked-cross-entropy":
        return _losses_of_logits(step.module(*inputs), labels_BT, experiment)
    head = find_known_head(step.module, experiment)
    with hidden_states_of(head.layer) as captured:
        step.module(*inputs)
    (hidden_BTd,) = captured
    if experiment.head == "logits":
        return _losses_of_chunks(hidden_BTd, head, labels_BT, experiment)
    with autocasting(experiment, hidden_BTd.device.type):
        losses_BT = linear_cross_entropy(
            hidden_BTd,
            head.layer,
            labels_BT,
            ignore_index=UNLABELLED,
            softcap=head.softcap,
            scale=head.scale,
            keep=experiment.head == "kept",
        )
    return mean_over_labels(losses_BT, labels_BT)


def _losses_of_logits(logits: Tensor, labels: Tensor, experiment: Experiment) -> Tensor:
    """Return samples' losses of logits; losses that the model has computed as they are."""
    if logits.dim() == 0:
        return logits
    is_sum = logits.dim() > 1 and experiment.loss == "sum-of-logits"
    losses_B = logits.flatten(1).sum(1) if is_sum else sample_losses(logits, labels)
    return losses_B.float() if losses_B.dtype in _SHORT else losses_B


def _losses_of_chunks(
    hidden_BTd: Tensor, head: Head, labels_BT: Tensor, experiment: Experiment
) -> Tensor:
    """Compute losses as torchtune's ``CEWithChunkedOutputLoss``: all logits, each piece apart."""
    with autocasting(experiment, hidden_BTd.device.type):
        chunks = [head.layer(chunk) for chunk in hidden_BTd.chunk(CHUNKS, dim=1)]
    losses = []
    for logits, labels in zip(chunks, labels_BT.chunk(CHUNKS, dim=1), strict=True):
        scaled = logits if head.scale == 1 else head.scale * logits
        if head.softcap is not None:
            scaled = head.softcap * torch.tanh(scaled / head.softcap)
        is_copied = experiment.loss_dtype == "float32" and scaled.dtype in _SHORT
        flat = (scaled.float() if is_copied else scaled).flatten(0, 1)
        of_tokens = functional.cross_entropy(
            flat, labels.flatten(), ignore_index=UNLABELLED, reduction="none"
        )
        losses.append(of_tokens.view(labels.shape))
    losses_BT = torch.cat(losses, dim=1)
    is_short = losses_BT.dtype in _SHORT
    return mean_over_labels(losses_BT.float() if is_short else losses_BT, labels_BT)


def find_known_head(model: nn.Module, experiment: Experiment) -> Head:
    """Return the head of a model whose logits are known to be its outputs, capped or scaled.

    Raises:
        UnsupportedError: The logits may be something else; or ``head chunked`` is asked for, and
            the head is no ``Linear``.
    """
    kind = getattr(experiment.model, "model_type", None)
    if kind is not None and kind not in KNOWN:
        raise UnsupportedError(f"{_name(experiment)} knows no {kind}; it knows {', '.join(KNOWN)}")
    head = describe_head(model, kind)
    is_plain = isinstance(head.layer, nn.Linear) and not is_quantized(head.layer.weight)
    if experiment.head != "logits" and not is_plain:
        kind = type(head.layer)
        raise UnsupportedError(
            f"{_name(experiment)} needs a torch.nn.Linear, and the head is a "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return head


def _name(experiment: Experiment) -> str:
    return "head chunked" if experiment.head != "logits" else f"loss {experiment.loss}"
