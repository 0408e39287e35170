"""The loss of each sample: its class's cross-entropy, or the mean over its own labelled tokens.

Shape legend: B batch, T tokens, V vocabulary or classes.
"""

from torch import Tensor
from torch.nn import functional

from dpprof.private.allocation_marks import allocates_for_its_caller

UNLABELLED = -100  # the label of a token that the loss ignores, as in PyTorch's cross-entropy


@allocates_for_its_caller
def sample_losses(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return each sample's cross-entropy, (B,), the mean over its labelled tokens, or 0.

    Logits are (B, T, V), or (B, V) where samples have classes; or the losses themselves, (B,),
    of a model that computes them (``WithLosses``). Labels are (B, T) or (B,). All ids have the
    share ``label_smoothing`` of the target alike.
    """
    if logits.dim() == 1:
        return logits
    losses = functional.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=UNLABELLED,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses if labels.dim() == 1 else mean_over_labels(losses.view(labels.shape), labels)


def mean_over_labels(losses_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Return each sample's mean over its labelled tokens, (B,), of losses that are 0 elsewhere."""
    return losses_BT.sum(1) / (labels_BT != UNLABELLED).sum(1).clamp(min=1)


def shift_labels(labels_BT: Tensor) -> Tensor:
    """Return the labels of causal models where each token's logits predict the next one; (B, T)."""
    return functional.pad(labels_BT[:, 1:], (0, 1), value=UNLABELLED)
