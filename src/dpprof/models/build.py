"""Builds an experiment's model."""

from typing import Any

from torch import nn

from dpprof.models.trainable import choose_trainable
from dpprof.models.transformer import Transformer
from dpprof.spec import registry
from dpprof.spec.architecture import Architecture
from dpprof.spec.experiment import Dimensions, Experiment
from dpprof.spec.registry import EntryPointError


def build_model(experiment: Experiment) -> nn.Module:
    """Build the model with fresh random weights, on the CPU, in float32.

    The registry's object is ``Dimensions``, or a function from the experiment to a module that maps
    token ids (B, T) to logits (B, T, V). The parameters that the experiment does not train are
    frozen; with ``parameters_dtype: bfloat16`` they are bfloat16 already, so that a device never
    holds them in float32.

    Raises:
        EntryPointError: It is neither, or the function returns something else.
        UnsupportedError: The model cannot be built, or nothing of it would be trained.
    """
    model = _build(experiment)
    if experiment.trained != "all" or experiment.lora is not None:
        choose_trainable(model, experiment)
    if experiment.parameters_dtype == "bfloat16":
        _store_frozen_in_16_bits(model)
    return model


def _store_frozen_in_16_bits(model: nn.Module) -> None:
    """Convert frozen parameters, but no vector beside a trained one: norms take only one dtype."""
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        trains_a_vector = any(one.requires_grad and one.dim() == 1 for one in own)
        for parameter in own:
            if not (parameter.requires_grad or (parameter.dim() == 1 and trains_a_vector)):
                parameter.data = parameter.data.bfloat16()


def _build(experiment: Experiment) -> nn.Module:
    recipe = _find_recipe(experiment)
    if isinstance(recipe, Architecture):
        from dpprof.models.hugging_face import build_causal_lm  # noqa: PLC0415 (an extra)

        return build_causal_lm(experiment)
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


def find_attention_size(experiment: Experiment, model: nn.Module) -> tuple[int, int] | None:
    """Return the number of layers with attention, and its width, of an experiment's model.

    Returns:
        None if another package builds the model, or if it has experts or layers of other kinds.
    """
    recipe = _find_recipe(experiment)
    if isinstance(recipe, Dimensions):
        return recipe.layers, recipe.d_model
    return read_attention_size(model) if isinstance(recipe, Architecture) else None


def read_attention_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the number of layers with attention, and its width, of a Hugging Face model.

    Returns:
        None if it has experts, convolutions, or no attention.
    """
    config: Any = next((one.config for one in model.modules() if hasattr(one, "config")), None)
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    if any(getattr(config, name, None) for name in experts) or not (heads and width):
        return None
    if any(isinstance(layer, nn.Conv1d) for layer in model.modules()):
        return None
    head = getattr(config, "head_dim", None) or width // heads
    return config.num_hidden_layers, heads * head


def _find_recipe(experiment: Experiment) -> Any:
    model = experiment.model
    return registry.load("models", model) if isinstance(model, str) else model
