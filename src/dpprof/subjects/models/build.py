"""Builds an experiment's model, in its precision, with the parameters frozen that it leaves out."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.fine_tuning import PARTS
from dpprof.experiments.config.naming import Dimensions, RecurrentSizes
from dpprof.experiments.config.registry import EntryPointError
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.model_heads import find_head
from dpprof.private.number_formats import SHORT
from dpprof.subjects.models.quantized import is_quantized
from dpprof.subjects.models.recurrent import build_recurrent
from dpprof.subjects.models.transformer import Transformer
from dpprof.subjects.models.with_losses import WithLosses

_PATTERNS = {"all": "", "lora": r"(^|\.)(lora|ia3)_", "bias": r"(^|\.)bias$"}
"""Regular expressions for the parts that are found by name."""


def build_model(experiment: Experiment, *, is_reduced: bool = False) -> nn.Module:
    """Build the model with fresh random weights, on the CPU, in float32.

    The registry's object is ``Dimensions``, ``RecurrentSizes``, or a function from the experiment
    to a module that maps token ids (B, T) to logits (B, T, V), or images (B, channels,
    ``image_size``, ``image_size``) to logits (B, classes); or to three: a model, a function from a
    batch to each sample's loss, and a batch, which make a ``WithLosses``. The parameters that the
    experiment does not train are frozen. Parameters that ``parameters_dtype`` and ``trained_dtype``
    store in 16 bits have them already, so that a device never holds them in float32.

    Args:
        experiment: The model, and how it is built.
        is_reduced: Whether a function with a method ``reduce`` builds a small model with the same
            layers.

    Raises:
        EntryPointError: It is neither, or the function returns something else.
        UnsupportedError: The model cannot be built, or nothing of it would be trained.
    """
    model = _build(experiment, is_reduced=is_reduced)
    if experiment.trained != "all" or experiment.lora is not None:
        _choose_trainable(model, experiment)
    if experiment.trained_dtype != "float32":
        for parameter in model.parameters():  # positions and the like keep their dtype
            if parameter.is_floating_point():  # so do packed weights
                parameter.data = parameter.data.to(getattr(torch, experiment.trained_dtype))
    elif experiment.parameters_dtype != "float32":
        _store_frozen(model, getattr(torch, experiment.parameters_dtype))
    return model


def _choose_trainable(model: nn.Module, experiment: Experiment) -> None:
    """Freeze the parameters that ``experiment.trainable`` leaves out.

    Raises:
        UnsupportedError: Nothing would be trained.
    """
    part = experiment.trained
    if part == "head":
        trained = set(find_head(model).parameters())
    else:
        pattern = _PATTERNS.get(part, part)
        trained = {p for name, p in model.named_parameters() if re.search(pattern, name)}
    if not trained:
        allowed = f"allowed: {', '.join(PARTS)}, or a regular expression that matches a name"
        raise UnsupportedError(f"trainable {part!r} matches no parameter; {allowed}")
    for parameter in model.parameters():
        if parameter in trained and is_quantized(parameter):
            raise UnsupportedError(
                f"trainable {part!r} asks for quantised weights, which cannot be trained; train "
                "adapters, by trainable lora, or leave quantization out"
            )
        parameter.requires_grad_(parameter in trained)


def _store_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert frozen parameters, except vectors beside a trained one: norms take only one dtype."""
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        trains_a_vector = any(tensor.requires_grad and tensor.dim() == 1 for tensor in own)
        for parameter in own:
            is_left = parameter.requires_grad or not parameter.is_floating_point()
            if not (is_left or (parameter.dim() == 1 and trains_a_vector)):
                parameter.data = parameter.data.to(dtype)


def apply_dtype(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
    """Return a model, already on its device, with the experiment's precision.

    float64 converts parameters. bfloat16 and float16 are autocast of the forward pass, unless
    ``autocast`` is false: gradients and optimizer state have the parameters' dtypes, and the
    backward pass uses the forward pass's dtypes. Logits are converted to ``loss_dtype``; a model
    that computes its losses returns these. float32 and tf32 change nothing here; tf32 is a setting
    of the device. ``parameters_dtype`` and ``trained_dtype`` are applied where the model is built.
    Of FSDP dtype is a policy in place of autocast (``distribute``).
    """
    if experiment.dtype == "float64":
        return model.double()
    is_sharded = experiment.parallel is not None and experiment.parallel.is_sharded
    is_short = experiment.dtype in SHORT and not is_sharded
    has_loss, keep = experiment.loss == "labels", experiment.keep_logits
    if is_short or has_loss or keep or experiment.use_cache:
        forward = model.forward
        kept: list[Any] = []

        def forward_as_asked(*inputs: Tensor) -> Tensor:
            if keep != "next-forward":
                kept.clear()
            with autocasting(experiment, device.type):
                returned: Any = forward(*inputs)
            loss, logits = returned if has_loss else (None, returned)
            cache = vars(model).pop("cache", None)
            if keep:
                kept[:] = [logits, cache]
            if loss is not None:
                return loss  # type: ignore[no-any-return]
            computed: Tensor = logits
            casts = is_short and experiment.loss_dtype == "float32"
            return computed.float() if casts else computed

        model.forward = forward_as_asked
    return model


def autocasting(experiment: Experiment, device_type: str) -> torch.autocast:
    """Return the context of a forward pass."""
    dtype = experiment.autocast_dtype
    enabled = dtype is not None
    return torch.autocast(device_type, getattr(torch, dtype or "bfloat16"), enabled=enabled)


def _build(experiment: Experiment, *, is_reduced: bool) -> nn.Module:
    recipe = find_recipe(experiment)
    if is_reduced:
        recipe = getattr(recipe, "reduce", lambda: recipe)()
    if isinstance(recipe, Architecture):
        from dpprof.subjects.models.hugging_face import build_hugging_face  # noqa: PLC0415 (an extra)

        return build_hugging_face(experiment)
    if isinstance(recipe, Dimensions):
        return Transformer(recipe, experiment)
    if isinstance(recipe, RecurrentSizes):
        return build_recurrent(recipe, experiment)
    name = str(experiment.model)  # of the registry
    if not callable(recipe):
        raise EntryPointError("models", name, "is no function from an experiment to a model")
    model = recipe(experiment)
    if isinstance(model, tuple):
        model = WithLosses.of(model, name)
    if not isinstance(model, nn.Module):
        raise EntryPointError(
            "models", name, f"returned {type(model).__name__} and not a torch.nn.Module"
        )
    return model


def find_attention_size(experiment: Experiment, model: nn.Module) -> tuple[int, int] | None:
    """Return the number of layers with attention, and its width, of an experiment's model.

    None if another package builds the model, or if it has experts, convolutions, or no attention.
    """
    recipe = find_recipe(experiment)
    if isinstance(recipe, Dimensions):
        return recipe.layers, recipe.d_model
    if not isinstance(recipe, Architecture):
        return None
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    config: Any = next(configs, None)
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    is_other = any(getattr(config, name, None) for name in experts) or any(
        isinstance(layer, nn.Conv1d) for layer in model.modules()
    )
    if is_other or not (heads and width):
        return None
    head = getattr(config, "head_dim", None) or width // heads
    return config.num_hidden_layers, heads * head


def find_recipe(experiment: Experiment) -> Any:
    """Return what the registry has for an experiment's model, or the model's own description."""
    model = experiment.model
    return registry.load("models", model) if isinstance(model, str) else model
