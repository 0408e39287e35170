"""Finds the rule that runs a layer, and refuses layers that cannot be clipped."""

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from dpprof.clipping.coverage import refuse_wrapper, trained_in
from dpprof.clipping.head import HeadLoss, run_head
from dpprof.clipping.layers import (
    Receive,
    run_conv1d,
    run_embedding,
    run_layer_norm,
    run_linear,
    run_rms_norm,
)
from dpprof.clipping.layers_without_rule import run_any_layer
from dpprof.clipping.patching import PatchedLayer, is_patched
from dpprof.clipping.rms_norms import recognise
from dpprof.spec.registry import UnsupportedError

LayerRule = Callable[..., Tensor]
"""Called with the layer, a function that receives its contributions, and the layer's arguments."""


def run_linear_or_head(
    layer: nn.Linear,
    receive: Receive,
    input: Tensor,  # noqa: A002 (torch's)
    loss: HeadLoss | None = None,
) -> Tensor:
    """Run a linear layer; with a loss, run it as a model's head without logits."""
    if loss is None:
        return run_linear(layer, receive, input)
    return run_head(layer, receive, input, loss)


RULES: Mapping[str, LayerRule] = {
    "torch.nn.modules.linear.Linear": run_linear_or_head,
    "torch.nn.modules.sparse.Embedding": run_embedding,
    "torch.nn.modules.normalization.LayerNorm": run_layer_norm,
    "torch.nn.modules.normalization.RMSNorm": run_rms_norm,
    "transformers.pytorch_utils.Conv1D": run_conv1d,
}
"""By the name of the class whose ``forward`` they replace."""


class Found(NamedTuple):
    """The rule of a layer."""

    rule: LayerRule
    replaced: type[nn.Module]
    """The class whose ``forward`` it replaces: the layer's own, or a base that this calls."""


BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
"""The common base of batch normalisations."""

KNOWN = {"weight", "bias"}
"""The parameters that every rule knows."""


def find_rules(model: nn.Module, wrapper: nn.Module | None) -> dict[nn.Module, Found]:
    """Find the rule of each layer that is trained.

    Args:
        model: The model.
        wrapper: Of its modules the one that may distribute it.

    Raises:
        UnsupportedError: A layer has none, or the model cannot be clipped.
    """
    rules: dict[nn.Module, Found] = {}
    for layer in model.modules():
        if layer is not wrapper:
            refuse_wrapper(layer)
        refuse_mixing(layer)
        found = find_rule(layer) if trained_in(layer) else None
        _refuse_hooks(layer)
        if found is not None:
            rules[layer] = found
    return rules


def _refuse_hooks(layer: nn.Module) -> None:
    """Refuse hooks on gradients, such as projections: autograd computes no gradient to hook."""
    for name, parameter in trained_in(layer).items():
        if parameter._backward_hooks:  # noqa: SLF001 (no public name)
            raise UnsupportedError(
                f"{name} of {type(layer).__name__} has a hook on its gradient, which clipping does "
                "not run; remove the hook, or freeze the parameter"
            )


def refuse_mixing(layer: nn.Module) -> None:
    """Refuse layers, with or without parameters, whose samples depend on one another.

    Raises:
        UnsupportedError: It is a batch normalisation that is trained or in training mode, or keeps
            statistics of its inputs, to which no noise is added.
    """
    name = type(layer).__name__
    if isinstance(layer, BATCH_NORM):
        if layer.training or trained_in(layer):
            raise UnsupportedError(
                f"{name} mixes samples; use GroupNorm or LayerNorm, or freeze it and call eval() "
                "of it before every forward"
            )
        if layer.running_mean is None:
            raise UnsupportedError(f"{name} keeps no statistics, so it mixes samples in eval() too")
    elif isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:  # noqa: SLF001
        raise UnsupportedError(
            f"{name} keeps statistics of its inputs without noise; set track_running_stats=False"
        )


def run_frozen_norm(layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Run a batch normalisation that is not trained; in ``eval()`` it mixes nothing.

    Raises:
        UnsupportedError: It is in training mode.
    """
    refuse_mixing(layer)
    assert isinstance(layer, PatchedLayer)
    y: Tensor = layer.original.forward(layer, *inputs)
    return y


def find_rule(layer: nn.Module) -> Found | None:
    """Find the rule of a layer; a layer without one is run by ``torch.func``.

    None for a module that contains layers, or holds parameters that others use: these must enter
    for all samples (``broadcasts``).

    A subclass has the rule of the class whose ``forward`` it inherits. A subclass of ``Embedding``
    may also call it by ``super()``, as in OPT and Gemma; ``torch.func`` would need a whole table
    for each sample. A layer that computes an RMS norm has the rule of RMS norms.

    Raises:
        UnsupportedError: The layer's parameters are computed from others, it is patched by another
            ``Clipping``, or it is an embedding whose options change its table or mix samples.
    """
    _refuse_held_elsewhere(layer)
    found = _find_by_class(layer)
    if found is not None:
        return found
    if isinstance(layer, nn.ParameterDict | nn.ParameterList) or any(
        True for child in layer.children() for _ in child.parameters()
    ):
        return None
    formula = recognise(layer)
    rule = run_any_layer if formula is None else formula.run
    return Found(rule, type(layer))


def _refuse_held_elsewhere(layer: nn.Module) -> None:
    """Refuse a layer whose forward is replaced, or whose parameters are computed."""
    name = type(layer).__name__
    if "forward" in vars(layer) or is_patched(layer):
        raise UnsupportedError(
            f"the forward of {name} is already replaced, maybe by another Clipping; remove() that "
            "first"
        )
    if isinstance(layer, ParametrizationList):
        raise UnsupportedError(
            "a parametrized weight is computed once for all samples, so it has no per-sample "
            "gradient; remove the parametrization, or freeze its parameters"
        )


def _find_by_class(layer: nn.Module) -> Found | None:
    """Find the rule of the class whose ``forward`` a layer inherits, or calls by ``super()``."""
    own = type(layer)
    for base in own.__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is None:
            continue
        inherits = vars(base).get("forward") == own.forward
        unknown = {name for name, _ in layer.named_parameters(recurse=False)} - KNOWN
        if inherits and unknown:
            raise UnsupportedError(
                f"{own.__name__} has a parameter {min(unknown)} that its rule does not know; a "
                "re-parametrized weight, such as weight_norm's, has no per-sample gradient"
            )
        if not inherits and (rule is not run_embedding or unknown):
            return None
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if rule is run_embedding and getattr(layer, option):
                raise UnsupportedError(
                    f"an embedding with {option} has no exact per-sample gradient"
                )
        return Found(rule, own if inherits else base) if _calls_forward_of(own, base) else None
    return None


def _calls_forward_of(own: type[nn.Module], base: type[nn.Module]) -> bool:
    """Tell whether every ``forward`` between a class and its base calls the next by ``super()``.

    One that uses the parameters otherwise too is found in backward, as a use outside of the layer.
    """
    between = own.__mro__[: own.__mro__.index(base)]
    written = [inspect.unwrap(vars(one)["forward"]) for one in between if "forward" in vars(one)]
    codes = [getattr(one, "__code__", None) for one in written]
    return all(code and {"super", "forward"} <= set(code.co_names) for code in codes)
