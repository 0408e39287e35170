"""``linear_cross_entropy``: the loss of a model's head without its logits (``head``).

The head is a linear layer, one that peft adapts by LoRA, or that of PyTorch's
``LinearCrossEntropyLoss``.

Shape legend: B samples, T tokens, d width of the hidden states.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.head import run_head
from dpprof.private.layers.head_losses import Beside, HeadLoss
from dpprof.private.layers.patching import is_patched_now
from dpprof.private.layers.sample_losses import UNLABELLED
from dpprof.private.refusals.coverage import class_names

_LORA = "peft.tuners.lora.layer.Linear"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def linear_cross_entropy(
    hidden_BTd: Tensor,
    head: nn.Module,
    labels_BT: Tensor,
    *,
    ignore_index: int = UNLABELLED,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    keep: bool = False,
) -> Tensor:
    """Compute each token's cross-entropy from hidden states, without keeping logits.

    It equals ``torch.nn.functional.cross_entropy`` of ``scale * head(hidden)``, capped where
    ``softcap`` is given: ``softcap * tanh(z / softcap)``. With a ``Clipping`` attached, the head is
    clipped as any layer; without, this is an ordinary loss, so that one script serves both.

    Args:
        hidden_BTd: What the head would get, (B, T, d).
        head: A ``torch.nn.Linear``, trained or frozen, whose weight may be that of the embedding;
            or one that peft adapts by LoRA.
        labels_BT: The ids to predict, (B, T) int64.
        ignore_index: The label of tokens without a loss.
        label_smoothing: The share of the target that all ids have alike; from 0 to below 1.
        softcap: The bound of logits, as in Gemma 2; None for none.
        scale: What logits are multiplied by, as in Cohere.
        keep: Whether a head that is trained keeps the gradients of its outputs until backward,
            B T V numbers of its inputs' dtype, a sixth to a third of what a loss with logits takes.
            That is faster.

    Returns:
        (B, T) in float32, or float64 for float64; 0 where a label is ignored. On a GPU a label
        outside of the vocabulary has the loss NaN, so that clipping excludes its sample.

    Raises:
        TypeError: The head is no ``Linear``, or one with another ``forward``.
        ValueError: Shapes do not fit, a label or option is out of its range, or a head that is not
            clipped has hooks.

    Formal guarantees: those of the clipping; the head's part is computed as for a ``Linear``.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping, linear_cross_entropy
        >>> body, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 9)
        >>> clipping = BookKeeping(torch.nn.Sequential(body, head), max_grad_norm=1.0)
        >>> labels = torch.zeros(2, 5, dtype=torch.int64)
        >>> losses = linear_cross_entropy(body(torch.ones(2, 5, 3)), head, labels)
        >>> clipping.backward(losses.mean(1))
        >>> clipping.sample_norms.shape
        torch.Size([2])
    """
    layer, x_BTd, beside = _split(head, hidden_BTd, labels_BT)
    loss = HeadLoss(labels_BT, ignore_index, label_smoothing, softcap, scale, keep, beside)
    loss.verify()
    if is_patched_now(layer):
        losses_BT: Tensor = layer(x_BTd, loss=loss)
        return losses_BT
    return run_head(layer, None, x_BTd, loss)


def _split(
    head: nn.Module, hidden_BTd: Tensor, labels_BT: Tensor
) -> tuple[nn.Linear, Tensor, Beside | None]:
    """Return the layer that is clipped, what it gets, and the frozen product beside it.

    Of a head with LoRA that is the last product of the adapter, beside the layer that it adapts;
    ``TypeError`` for all but one plain adapter that is on, and where the layer itself is trained.
    """
    if _LORA not in class_names(head):
        return _verify(hidden_BTd, head, labels_BT), hidden_BTd, None
    adapted: Any = head
    names = [name for name in adapted.active_adapters if name in adapted.lora_A]
    if (
        len(names) != 1
        or adapted.merged
        or adapted.disable_adapters
        or names[0] in adapted.lora_variant
        or any(p.requires_grad for p in adapted.base_layer.parameters())
    ):
        raise TypeError(
            "a head with LoRA needs one active adapter, plain and not merged, on a frozen layer"
        )
    (name,) = names
    first = adapted.lora_A[name]
    x_BTd = hidden_BTd.to(first.weight.dtype)
    low_BTr: Tensor = first(adapted.lora_dropout[name](x_BTd)) * adapted.scaling[name]
    frozen = _verify(hidden_BTd, adapted.base_layer, labels_BT)
    layer = _verify(low_BTr, adapted.lora_B[name], labels_BT)
    return layer, low_BTr, Beside(hidden_BTd, frozen.weight, frozen.bias)


def _verify(hidden_BTd: Tensor, head: nn.Module, labels_BT: Tensor) -> nn.Linear:
    """Return a head that computes a ``Linear``'s outputs, whose inputs and labels fit."""
    plain = getattr(type(head), "original", type(head))  # of a patched layer
    if getattr(plain, "forward", None) is not nn.Linear.forward or "forward" in vars(head):
        raise TypeError(
            f"head must be a Linear with its own forward, and is a {plain.__name__}; a layer that "
            "is quantised, adapted or replaced computes something else"
        )
    if not is_patched_now(head) and any(vars(head)[hooks] for hooks in _HOOKS):
        raise ValueError("head has hooks, which would not run: remove them, or compute its logits")
    assert isinstance(head, nn.Linear)
    if hidden_BTd.dim() != 3 or hidden_BTd.shape[2] != head.in_features:  # noqa: PLR2004
        shape = tuple(hidden_BTd.shape)
        raise ValueError(f"hidden must be (B, T, {head.in_features}), and has shape {shape}")
    for tensor in (hidden_BTd, head.weight):
        if not tensor.is_floating_point():
            raise ValueError(
                f"cross-entropy takes real numbers, and hidden or head is {tensor.dtype}"
            )
    if labels_BT.shape != hidden_BTd.shape[:2] or labels_BT.dtype != torch.int64:
        raise ValueError(
            f"labels must be {tuple(hidden_BTd.shape[:2])} int64, and are "
            f"{tuple(labels_BT.shape)} {labels_BT.dtype}"
        )
    return head


def is_loss_with_head(module: nn.Module) -> bool:
    """Tell whether a module is PyTorch's ``LinearCrossEntropyLoss``, which 2.13 brought."""
    loss = getattr(nn, "LinearCrossEntropyLoss", None)
    return loss is not None and type(module) is loss


def refuse_other_loss(layer: nn.Module) -> None:
    """Refuse PyTorch's ``LinearCrossEntropyLoss`` where ``linear_cross_entropy`` is another one."""
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
    """Run PyTorch's loss of (B, d) and (B,) ids, no probabilities (``ValueError``); return (B,)."""
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
