"""The losses of a step whose head may be computed in chunks."""

from torch import Tensor, nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.linear_cross_entropy import linear_cross_entropy
from dpprof.private.layers.model_heads import KNOWN, Head, describe_head, hidden_states_of
from dpprof.private.layers.sample_losses import UNLABELLED, mean_over_labels, sample_losses
from dpprof.subjects.methods.training_step import TrainingStep
from dpprof.subjects.models.build import autocasting
from dpprof.subjects.models.quantized import is_quantized


def losses_of(step: TrainingStep, labels_BT: Tensor, *inputs: Tensor) -> Tensor:
    """Run a step's model, and return each sample's mean cross-entropy over its labelled tokens.

    With ``head: chunked`` and ``kept`` the logits of some tokens exist at a time.

    Returns:
        (B,); 0 for a sample without labels.
    """
    experiment = step.experiment
    if experiment.head == "logits":
        return sample_losses(step.module(*inputs), labels_BT)
    head = find_known_head(step.module, experiment)
    with hidden_states_of(head.layer) as captured:
        step.module(*inputs)
    (hidden_BTd,) = captured
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


def find_known_head(model: nn.Module, experiment: Experiment) -> Head:
    """Return the head of a model whose logits are known to be its outputs, capped or scaled.

    Raises:
        UnsupportedError: The logits may be something else, or the head is no ``Linear``.
    """
    kind = getattr(experiment.model, "model_type", None)
    if kind is not None and kind not in KNOWN:
        raise UnsupportedError(f"head chunked knows no {kind}; it knows {', '.join(KNOWN)}")
    head = describe_head(model, kind)
    if not isinstance(head.layer, nn.Linear) or is_quantized(head.layer.weight):
        raise UnsupportedError(
            f"head chunked needs a Linear, and the head is {type(head.layer).__name__}"
        )
    return head
