"""The head of a language model, and its hidden states in place of its logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from dpprof.private.errors import UnsupportedError

_CAPPED = ("gemma2", "gemma3_text")
_SCALED = ("cohere", "cohere2")
_DIVIDED = ("granite",)
_PLAIN = (
    *("bloom", "falcon", "gemma", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "olmo", "olmo2"),
    *("opt", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
)
KNOWN = tuple(sorted((*_CAPPED, *_SCALED, *_DIVIDED, *_PLAIN)))
"""Hugging Face's architectures whose logits are what the head returns, capped or scaled as their
config says, and nothing else."""


class Head(NamedTuple):
    """The layer that makes logits, and what is done with them."""

    layer: nn.Module
    softcap: float | None = None
    scale: float = 1.0


_NAMES = ("head", "classifier", "score", "classification_head")  # attributes: the first there is


def find_head(model: nn.Module) -> nn.Module:
    """Return the layer, or the layers, that make the logits; ``UnsupportedError`` if unknown."""
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        head = find() if find is not None else None
        for layer in (head, *(getattr(module, name, None) for name in _NAMES)):
            if isinstance(layer, nn.Module):
                return layer
    raise UnsupportedError("the model does not say which layer makes the logits")


def describe_head(model: nn.Module, kind: str | None) -> Head:
    """Return the head of a model, as ``find_head``, and what its config says of the logits.

    ``kind`` is the architecture's name in transformers, None for another model. An architecture
    that is not ``KNOWN`` has a plain head.
    """
    layer, config = find_head(model), find_config(model)
    if kind in _CAPPED:
        return Head(layer, softcap=config.final_logit_softcapping)
    if kind in _SCALED:
        return Head(layer, scale=float(config.logit_scale))
    if kind in _DIVIDED:
        return Head(layer, scale=1 / float(config.logits_scaling))
    return Head(layer)


def find_config(model: nn.Module) -> Any:
    """Return the config of the Hugging Face model within a model; None where there is none."""
    with_heads = (m for m in model.modules() if hasattr(m, "get_output_embeddings"))
    return next((module.config for module in with_heads if hasattr(module, "config")), None)


@contextmanager
def hidden_states_of(head: nn.Module) -> Iterator[list[Tensor]]:
    """Let the head return one logit of zero for each token; yield a list of what it gets."""
    if "forward" in vars(head):
        raise UnsupportedError("the forward of the head is already replaced")
    hidden_states: list[Tensor] = []

    def take(hidden_BTd: Tensor) -> Tensor:
        hidden_states.append(hidden_BTd)
        return hidden_BTd.new_zeros(*hidden_BTd.shape[:-1], 1)

    head.forward = take
    try:
        yield hidden_states
    finally:
        del head.forward
