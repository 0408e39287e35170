"""Splits a head that peft adapts by LoRA: its adapter's last product, and the frozen layer."""

from typing import Any

from torch import Tensor, nn

from dpprof.private.refusals.coverage import class_names

_LORA = "peft.tuners.lora.layer.Linear"


def is_adapted(head: nn.Module) -> bool:
    """Tell whether a head is a linear layer with adapters of peft's LoRA."""
    return _LORA in class_names(head)


def split_adapted(head: nn.Module, hidden_BTd: Tensor) -> tuple[nn.Module, Tensor, nn.Module]:
    """Split ``head(hidden)`` into the last product of its adapter and the layer it adapts.

    Returns:
        The adapter's last layer; what this gets, (B, T, rank); and the layer, which is frozen.

    Raises:
        TypeError: The head computes something else: several adapters, one that is merged or
            switched off, or another kind than plain LoRA; or the layer itself is trained.
    """
    adapted: Any = head
    names = [name for name in adapted.active_adapters if name in adapted.lora_A]
    base: nn.Module = adapted.base_layer
    if (
        len(names) != 1
        or adapted.merged
        or adapted.disable_adapters
        or names[0] in adapted.lora_variant
        or any(p.requires_grad for p in base.parameters())
    ):
        raise TypeError(
            "a head with LoRA needs one active adapter, plain and not merged, on a frozen layer"
        )
    (name,) = names
    first = adapted.lora_A[name]
    hidden_BTd = hidden_BTd.to(first.weight.dtype)
    low_BTr: Tensor = first(adapted.lora_dropout[name](hidden_BTd)) * adapted.scaling[name]
    return adapted.lora_B[name], low_BTr, base
