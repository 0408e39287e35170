"""PyTorch's ``LinearCrossEntropyLoss``, which has a head of its own, as a loss without logits."""

from typing import Any

from torch import Tensor, nn

from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.head import linear_cross_entropy
from dpprof.private.layers.sample_losses import UNLABELLED


def is_loss_with_head(module: nn.Module) -> bool:
    """Tell whether a module is PyTorch's ``LinearCrossEntropyLoss``, which 2.13 brought."""
    loss = getattr(nn, "LinearCrossEntropyLoss", None)
    return loss is not None and type(module) is loss


def refuse_other_loss(layer: nn.Module) -> None:
    """Refuse PyTorch's ``LinearCrossEntropyLoss`` where ``linear_cross_entropy`` is another loss.

    Raises:
        UnsupportedError: It joins samples, weights classes, or has several outputs for a row.
    """
    loss: Any = layer
    for name, value, only in (
        ("reduction", loss.reduction, "none"),
        ("weight", loss.weight, None),
        ("out_features", loss.out_features, ()),
    ):
        if isinstance(value, Tensor) or value != only:
            raise UnsupportedError(
                f"LinearCrossEntropyLoss is clipped with {name}={only!r} alone, and its {name} is "
                f"{value!r}; or use dpprof.private.linear_cross_entropy with its linear layer"
            )


def run_linear_cross_entropy_loss(layer: nn.Module, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
    """Run PyTorch's ``LinearCrossEntropyLoss`` of (B, d) and (B,) ids, and return (B,).

    Raises:
        ValueError: The shapes are others, as for class probabilities.
    """
    loss: Any = layer
    if input.dim() != 2 or target.dim() != 1:  # noqa: PLR2004
        shapes = f"{tuple(input.shape)} and {tuple(target.shape)}"
        raise ValueError(
            f"LinearCrossEntropyLoss is clipped with inputs (B, d) and ids (B,), and got {shapes}; "
            "for (B, T, d) use dpprof.private.linear_cross_entropy with its linear layer"
        )
    losses_B1 = linear_cross_entropy(
        input[:, None],
        loss.linear,
        target[:, None],
        ignore_index=UNLABELLED if loss.ignore_index is None else loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )
    return losses_B1[:, 0]
