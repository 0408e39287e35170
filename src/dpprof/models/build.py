"""Builds an experiment's model."""

from typing import Any

from torch import nn

from dpprof.models.transformer import Transformer
from dpprof.spec import registry
from dpprof.spec.experiment import Dimensions, Experiment
from dpprof.spec.registry import EntryPointError


def build_model(experiment: Experiment) -> nn.Module:
    """Build the model with fresh random weights, on the CPU, in float32.

    The registry's object is ``Dimensions``, or a function from the experiment to a module that maps
    token ids (B, T) to logits (B, T, V).

    Raises:
        EntryPointError: It is neither, or the function returns something else.
    """
    recipe = _find_recipe(experiment)
    if isinstance(recipe, Dimensions):
        return Transformer(
            recipe, experiment.seq_len, experiment.attention, experiment.checkpointing
        )
    name = experiment.model_name
    if not callable(recipe):
        raise EntryPointError("models", name, "is no function from an experiment to a model")
    model = recipe(experiment)
    if not isinstance(model, nn.Module):
        raise EntryPointError(
            "models", name, f"returned {type(model).__name__} and not a torch.nn.Module"
        )
    return model


def find_dimensions(experiment: Experiment) -> Dimensions | None:
    """Return the size of the experiment's model; None if another package builds it."""
    recipe = _find_recipe(experiment)
    return recipe if isinstance(recipe, Dimensions) else None


def _find_recipe(experiment: Experiment) -> Any:
    model = experiment.model
    return registry.load("models", model) if isinstance(model, str) else model
