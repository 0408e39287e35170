"""From an experiment to its model."""

from torch import nn

from dpprof import catalogue
from dpprof.experiment import Dimensions, Experiment
from dpprof.models.transformer import Transformer


def build_model(experiment: Experiment) -> nn.Module:
    """Build the model with fresh random weights, on the CPU, in float32.

    A catalogue entry is either ``Dimensions`` or a function from the experiment to a
    module that maps token ids (B, T) to logits (B, T, V).
    """
    recipe = experiment.model
    if isinstance(recipe, str):
        recipe = catalogue.load("models", recipe)
    if isinstance(recipe, Dimensions):
        return Transformer(recipe, experiment.seq_len, experiment.attention)
    model: nn.Module = recipe(experiment)
    return model
