"""The head of a language model, and its hidden states in place of its logits."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError

PLAIN = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3")
"""Hugging Face's architectures whose logits are what the head returns, and nothing else."""


def find_head(model: nn.Module) -> nn.Module:
    """Return the layer that makes the logits.

    Raises:
        UnsupportedError: The model does not say which.
    """
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        head = find() if find is not None else getattr(module, "head", None)
        if isinstance(head, nn.Module):
            return head
    raise UnsupportedError("the model does not say which layer makes the logits")


def find_plain_head(model: nn.Module, experiment: Experiment) -> nn.Linear:
    """Return the head of a model whose logits are what that returns.

    Raises:
        UnsupportedError: The logits may be something else, or the head is no ``Linear``.
    """
    kind = getattr(experiment.model, "model_type", None)
    if kind is not None and kind not in PLAIN:
        known = ", ".join(PLAIN)
        raise UnsupportedError(f"head chunked knows no {kind}; it knows {known}")
    head = find_head(model)
    if not isinstance(head, nn.Linear):
        raise UnsupportedError(
            f"head chunked needs a Linear, and the head is {type(head).__name__}"
        )
    return head


@contextmanager
def hidden_states_of(head: nn.Module) -> Iterator[None]:
    """Let the model return, inside the context, what its head gets."""
    if "forward" in vars(head):
        raise UnsupportedError("the forward of the head is already replaced")
    head.forward = _return_input
    try:
        yield
    finally:
        del head.forward


def _return_input(hidden_BTd: Tensor) -> Tensor:
    return hidden_BTd
