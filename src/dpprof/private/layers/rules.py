"""Finds the rule that runs a layer, and refuses layers that cannot be clipped."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from dpprof.private.contributions.contributions import Receive
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.attention import refuse_other_projection, run_attention
from dpprof.private.layers.batch_axis import Settings, run_tokenwise
from dpprof.private.layers.convolutions import run_convolution, run_transposed_convolution
from dpprof.private.layers.embedding_bag import run_embedding_bag
from dpprof.private.layers.head import run_head
from dpprof.private.layers.head_losses import HeadLoss
from dpprof.private.layers.layers import (
    run_conv1d,
    run_embedding,
    run_layer_norm,
    run_linear,
    run_rms_norm,
)
from dpprof.private.layers.layers_without_rule import run_any_layer, run_any_layer_on
from dpprof.private.layers.linear_cross_entropy import (
    is_loss_with_head,
    refuse_other_loss,
    run_linear_cross_entropy_loss,
)
from dpprof.private.layers.normalisations import (
    Recognised,
    recognise,
    run_group_norm,
    run_instance_norm,
)
from dpprof.private.layers.patching import PatchedLayer, calls_forward_of, is_patched
from dpprof.private.layers.quantized_layers import is_quantized, refuse_quantized, run_quantized
from dpprof.private.layers.recurrent import run_cell, run_opacus_recurrent, run_recurrent
from dpprof.private.layers.rotary_positions import refuse_positions
from dpprof.private.refusals.coverage import refuse_wrapper, trained_in
from dpprof.private.refusals.gradient_hooks import refuse_hooks
from dpprof.private.refusals.tensor_kinds import refuse_parameter

LayerRule = Callable[..., Any]  # of the layer, what receives its contributions, and arguments


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
    "torch.nn.modules.sparse.EmbeddingBag": run_embedding_bag,
    "torch.nn.modules.activation.MultiheadAttention": run_attention,
    **dict.fromkeys(
        (f"torch.nn.modules.rnn.{kind}" for kind in ("RNN", "LSTM", "GRU")), run_recurrent
    ),
    **dict.fromkeys(
        (f"torch.nn.modules.rnn.{kind}Cell" for kind in ("RNN", "LSTM", "GRU")), run_cell
    ),
    "opacus.layers.dp_rnn.DPRNNBase": run_opacus_recurrent,
    "torch.nn.modules.normalization.GroupNorm": run_group_norm,
    **{f"torch.nn.modules.conv.Conv{n}d": run_convolution for n in (1, 2, 3)},
    **{f"torch.nn.modules.conv.ConvTranspose{n}d": run_transposed_convolution for n in (1, 2, 3)},
    **{f"torch.nn.modules.instancenorm.InstanceNorm{n}d": run_instance_norm for n in (1, 2, 3)},
}
"""The rules, by the name of the class whose ``forward`` they replace."""


class Found(NamedTuple):
    """The rule of a layer."""

    rule: LayerRule
    replaced: type[nn.Module]  # whose ``forward`` it replaces: the layer's own, or a base


BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
"""The common base of batch normalisations."""

_KNOWN: Mapping[LayerRule, str] = {
    run_attention: "in_proj_(weight|bias)|[qkv]_proj_weight|bias_[kv]",
    run_cell: "(weight|bias)_(ih|hh)",
    run_recurrent: r"(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?",
    run_opacus_recurrent: r"(weight|bias)_(ih|hh)_l\d+(_reverse)?",
}
"""The names of the parameters that a rule knows; other rules know a weight and a bias."""

_CALLED_BY_SUPER = (run_embedding, run_embedding_bag, run_attention, run_recurrent, run_cell)
"""Rules that also run a layer whose own ``forward`` calls the base's."""

_COMPLEX = (run_linear_or_head, run_conv1d, run_embedding)  # rules that know complex parameters

_NOT_COMPLEX = (run_attention, run_recurrent, run_opacus_recurrent)
"""Rules of layers that cannot run without one; all others run complex layers without a rule."""

_TOKENWISE: Mapping[LayerRule, int] = {
    run_linear_or_head: 1,
    run_conv1d: 1,
    run_embedding: 0,
    run_layer_norm: 1,
    run_rms_norm: 1,
}
"""Rules that treat every token alike, and how many axes a token has at least."""


def find_rules(
    model: nn.Module,
    wrapper: nn.Module | None,
    second: Mapping[nn.Module, Settings],
    *,
    is_sharded: bool = False,
) -> dict[nn.Module, Found]:
    """Find the rule of each layer that is trained.

    ``wrapper`` is the module that may distribute the model, and modules in ``second`` may have the
    batch on their second axis. ``UnsupportedError``: a layer has none, or cannot be clipped.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            refuse_parameter(name, parameter)
    refuse_positions(model)
    rules: dict[nn.Module, Found] = {}
    for layer in model.modules():
        if layer is not wrapper:
            refuse_wrapper(layer)
        refuse_mixing(layer)
        refuse_quantized(layer, is_sharded=is_sharded)
        # Attention uses the weight of its projection without calling it.
        used = layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer
        rule = find_rule(layer) if trained_in(layer) or trained_in(used) else None
        if rule is not None:
            rules[layer] = rule
            if layer in second:
                rules[layer] = _let_batch_be_second(rule, layer, second[layer])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            refuse_hooks(name, parameter)
    return rules


def _let_batch_be_second(chosen: Found, layer: nn.Module, settings: Settings) -> Found:
    """Let a rule run a layer whose batch may be second; some rules see to that themselves."""
    rule = chosen.rule
    if rule is run_any_layer:
        return chosen._replace(rule=partial(run_any_layer_on, settings))
    formula = getattr(rule, "__self__", None)
    if isinstance(formula, Recognised):
        return chosen._replace(rule=partial(formula.run_on, settings))
    if rule not in _TOKENWISE:
        return chosen
    widths = len(getattr(layer, "normalized_shape", ())) or _TOKENWISE[rule]
    return chosen._replace(rule=partial(run_tokenwise, rule, widths, settings))


def refuse_mixing(layer: nn.Module) -> None:
    """Refuse layers whose samples depend on one another (``UnsupportedError``).

    These are batch normalisations that are trained or in training mode, or keep statistics of
    their inputs, to which no noise is added.
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


def find_rewritten(model: nn.Module) -> dict[nn.Module, Callable[..., Tensor]]:
    """Find the functions of modules without trained parameters of their own that run otherwise.

    These are frozen batch normalisations, quantised layers, and losses whose head is trained;
    ``UnsupportedError``: such a loss is not one for each sample.
    """
    runs: dict[nn.Module, Callable[..., Tensor]] = {}
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            runs[module] = partial(run_frozen_norm, module)
        elif is_quantized(module):
            runs[module] = partial(run_quantized, module)
        elif is_loss_with_head(module) and any(p.requires_grad for p in module.parameters()):
            refuse_other_loss(module)
            runs[module] = partial(run_linear_cross_entropy_loss, module)
    return runs


def run_frozen_norm(layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Run a batch normalisation that is not trained; ``UnsupportedError`` in training mode."""
    refuse_mixing(layer)
    assert isinstance(layer, PatchedLayer)
    y: Tensor = layer.original.forward(layer, *inputs)
    return y


def find_rule(layer: nn.Module) -> Found | None:
    """Find the rule of a layer; ``torch.func`` runs a layer without one.

    A module that contains layers, or holds parameters that others use, has none (None): its
    parameters must enter for all samples (``broadcasts``). A subclass has the rule of the class
    whose ``forward`` it inherits. One of an embedding, attention or a recurrent layer may also
    call it by ``super()``, as in OPT and Gemma: for these ``torch.func`` fails, or needs a
    whole table for each sample. A layer that computes an RMS norm has the rule of RMS norms.
    ``UnsupportedError``: the layer's parameters are computed from others, it is patched by
    another ``Clipping``, or it is an embedding whose options change its table or mix samples.
    """
    _refuse_held_elsewhere(layer)
    by_class = _find_by_class(layer)
    is_complex = any(parameter.is_complex() for parameter in trained_in(layer).values())
    if by_class is not None and is_complex and by_class.rule not in _COMPLEX:
        if by_class.rule in _NOT_COMPLEX:
            raise UnsupportedError(
                f"{type(layer).__name__} has complex parameters, which its rule does not know; "
                "write it with real ones for both parts, or freeze them"
            )
        return by_class._replace(rule=run_any_layer)
    if by_class is not None:
        return by_class
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
            f"the forward of {name} is already replaced, maybe by another Clipping; first call "
            "remove() of that, or of what make_private returned"
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
        inherits = _inherits_forward(layer, base)
        pattern = re.compile(_KNOWN.get(rule, "weight|bias"))
        own_names = (name for name, _ in layer.named_parameters(recurse=False))
        unknown = [name for name in own_names if not pattern.fullmatch(name)]
        if inherits and unknown:
            raise UnsupportedError(
                f"{own.__name__} has a parameter {min(unknown)} that its rule does not know; a "
                "re-parametrized weight, such as weight_norm's, has no per-sample gradient"
            )
        if not inherits and (rule not in _CALLED_BY_SUPER or unknown):
            return None
        if rule is run_attention:
            refuse_other_projection(layer)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option, None) and rule in (run_embedding, run_embedding_bag):
                raise UnsupportedError(
                    f"an embedding with {option} has no exact per-sample gradient"
                )
        return Found(rule, own if inherits else base) if calls_forward_of(own, base) else None
    return None


def _inherits_forward(layer: nn.Module, base: type[nn.Module]) -> bool:
    """Tell whether a layer runs a base's ``forward``, and every method of the base in it."""
    own: Any = type(layer)
    if own.forward != base.forward:
        return False
    called = inspect.unwrap(base.forward).__code__.co_names
    return not any(
        name in vars(layer) or getattr(own, name) is not getattr(base, name)
        for name in called
        if callable(getattr(base, name, None))
    )
