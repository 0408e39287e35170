"""Per-sample losses of Hugging Face's causal language models, without their logits."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.linear_cross_entropy import linear_cross_entropy
from dpprof.private.layers.model_heads import describe_head, find_config, hidden_states_of
from dpprof.private.layers.sample_losses import UNLABELLED, mean_over_labels, shift_labels

_SAME = {torch.float64: 1e-6, torch.float32: 1e-4}  # how rounding may change a model's own loss

_SAME_IN_16_BITS = 0.05

_verified: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models whose own loss is the same


def causal_lm_losses(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    keep: bool = False,
    **inputs: Any,
) -> Tensor:
    """Compute each sample's mean cross-entropy over its labelled tokens, without logits.

    It replaces ``model(input_ids, labels=labels, ...).loss``, which is a mean over the tokens of
    all samples, so that one sample's loss depends on the others. The model's head does nothing
    while the model runs; ``linear_cross_entropy`` computes its part. The first call compares one
    sample's loss with the model's own, in ``eval()``.

    Args:
        model: A causal language model of transformers, maybe with adapters of peft or under
            ``DistributedDataParallel``. Its head is a ``Linear``.
        input_ids: (B, T) int64.
        labels: (B, T) int64, as transformers takes them: the model shifts them; -100 for tokens
            without a loss.
        label_smoothing: As for ``linear_cross_entropy``.
        keep: As for ``linear_cross_entropy``.
        inputs: What else the model gets, such as ``attention_mask``; of tensors, samples first.

    Returns:
        (B,) in float32, or float64 for float64; 0 for a sample without labels.

    Raises:
        UnsupportedError: The model's own loss is another one, or the model has no such head.
        ValueError, TypeError: ``linear_cross_entropy`` raises them.

    Formal guarantees: those of the clipping.

    Example:
        >>> clipping.backward(causal_lm_losses(model, ids, labels))  # doctest: +SKIP
    """
    if model not in _verified and not isinstance(input_ids, FakeTensor):  # which has no elements
        _verify(model, input_ids, labels, inputs)
    options = {"keep": keep, "label_smoothing": label_smoothing}
    return _compute(model, input_ids, labels, inputs, **options)


def _compute(
    model: nn.Module, input_ids: Tensor, labels_BT: Tensor, inputs: dict[str, Any], **options: Any
) -> Tensor:
    head = describe_head(model, getattr(find_config(model), "model_type", None))
    with hidden_states_of(head.layer) as hidden:
        model(input_ids=input_ids, **inputs)
    next_BT = shift_labels(labels_BT)
    losses_BT = linear_cross_entropy(
        hidden[0], head.layer, next_BT, softcap=head.softcap, scale=head.scale, **options
    )
    return mean_over_labels(losses_BT, next_BT)


@torch.no_grad()
def _verify(model: nn.Module, input_ids: Tensor, labels_BT: Tensor, inputs: dict[str, Any]) -> None:
    """Compare one sample's loss with the model's own; the first one's ids are labels if none is."""
    labelled = (labels_BT[:, 1:] != UNLABELLED).any(1).nonzero().flatten().tolist()
    if not labelled:  # ranks with shards run the model together, whatever labels each has
        labels_BT, labelled = input_ids, [0]
    if not labels_BT[:, 1:].numel():
        return
    some = slice(labelled[0], labelled[0] + 1)
    cut = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(input_ids):
            cut[name] = x[some]
    with evaluated(model):
        loss = _compute(model, input_ids[some], labels_BT[some], cut)[0]
        expected = model(input_ids=input_ids[some], labels=labels_BT[some], **cut).loss
    if not is_same_loss(model, loss, expected):
        raise UnsupportedError(
            f"{type(model).__name__} computes its loss otherwise than as the cross-entropy of its "
            "head's outputs; compute losses from its logits"
        )
    _verified.add(model)


def is_same_loss(model: nn.Module, loss: Tensor, expected: Tensor) -> bool:
    """Tell whether a loss is a model's own, but for rounding."""
    has_16_bits = torch.is_autocast_enabled(loss.device.type) or any(
        p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()
    )
    limit = _SAME_IN_16_BITS if has_16_bits else _SAME.get(expected.dtype, _SAME_IN_16_BITS)
    return abs(float(loss) - float(expected)) <= limit * abs(float(expected))


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Let nothing drop out inside the context."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
