"""The losses of a step whose head may be computed in chunks."""

from torch import Tensor

from dpprof.clipping.head import linear_cross_entropy
from dpprof.methods.training_step import TrainingStep
from dpprof.models.build import autocasting
from dpprof.models.heads import find_known_head, hidden_states_of
from dpprof.models.sample_losses import UNLABELLED, mean_over_labels, sample_losses


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
    with hidden_states_of(head.layer) as given:
        step.module(*inputs)
    (hidden_BTd,) = given
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
