"""Which of a model's parameters are trained."""

import re

from torch import nn

from dpprof.spec.experiment import Experiment
from dpprof.spec.fine_tuning import PARTS
from dpprof.spec.registry import UnsupportedError

_PATTERNS = {"all": "", "lora": r"(^|\.)lora_", "bias": r"(^|\.)bias$"}
"""Regular expressions for the parts that names tell."""


def choose_trainable(model: nn.Module, experiment: Experiment) -> None:
    """Freeze the parameters that ``experiment.trainable`` leaves out.

    Raises:
        UnsupportedError: Nothing would be trained.
    """
    part = experiment.trained
    trained = _find(model, part)
    if not trained:
        allowed = f"allowed: {', '.join(PARTS)}, or a regular expression that matches a name"
        raise UnsupportedError(f"trainable {part!r} matches no parameter; {allowed}")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


def _find(model: nn.Module, part: str) -> set[nn.Parameter]:
    named = list(model.named_parameters())
    if part == "head":
        return _find_head(model)
    pattern = _PATTERNS.get(part, part)
    return {parameter for name, parameter in named if re.search(pattern, name)}


def _find_head(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the layer that makes the logits."""
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        head = find() if find is not None else getattr(module, "head", None)
        if isinstance(head, nn.Module):
            return set(head.parameters())
    raise UnsupportedError("trainable head: the model does not say which layer makes the logits")
