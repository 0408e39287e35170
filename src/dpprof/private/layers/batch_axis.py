"""Finds the layers that have the batch on their second axis, and runs their rules.

A module of PyTorch or Opacus has the setting ``batch_first``, for itself and the layers directly in
it. Users declare other modules, with all modules in them. The nearest setting or declaration holds;
lengths decide nothing. The first batch confirms it (``first_batch``).

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from dpprof.private.contributions.contributions import Receive, receive_turned
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.patching import calls_forward_of
from dpprof.private.refusals.coverage import class_names

_SETTING_IN = {
    "torch.nn.modules.activation.MultiheadAttention": "",
    "torch.nn.modules.rnn.RNNBase": "",
    "torch.nn.modules.transformer.Transformer": "",
    "torch.nn.modules.transformer.TransformerEncoder": "layers.0.self_attn",
    "torch.nn.modules.transformer.TransformerEncoderLayer": "self_attn",
    "torch.nn.modules.transformer.TransformerDecoder": "layers.0.self_attn",
    "torch.nn.modules.transformer.TransformerDecoderLayer": "self_attn",
    "opacus.layers.dp_multihead_attention.DPMultiheadAttention": "",
    "opacus.layers.dp_multihead_attention.SequenceBias": "",
    "opacus.layers.dp_rnn.DPRNNBase": "",
}
"""The module whose ``batch_first`` holds for a class and the layers directly in it, by class."""

_ATTENTION = nn.MultiheadAttention
_FIRST, _SECOND = SimpleNamespace(batch_first=True), SimpleNamespace(batch_first=False)

Settings = Sequence[Any]  # modules with the ``batch_first`` of a layer, several if shared


def find_batch_second(model: nn.Module, declared: Collection[str]) -> dict[nn.Module, Settings]:
    """Find the modules that may have the batch on their second axis, and their settings.

    Modules with the ``declared`` names have it there, with all modules in them; ``ValueError`` if
    there is no module of such a name, or it has ``batch_first=True``.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    for name in declared:
        if name not in names:
            close = difflib.get_close_matches(name, names, cutoff=0.4)
            raise ValueError(
                f"batch_second names {name!r}, which is no module of the model"
                + (f"; is it {' or '.join(map(repr, close))}?" if close else "")
            )
    passed_on: dict[str, Any] = {}
    is_inside: dict[str, bool] = {}
    settings: dict[nn.Module, list[Any]] = defaultdict(list)
    for name, module in names.items():
        own, is_declared = _find_setting(module), name in declared
        if is_declared and own is not None and own.batch_first:
            raise ValueError(f"batch_second names {name!r}, which has batch_first=True")
        around = name.rpartition(".")[0]  # the root lies in itself, and has passed on nothing yet
        is_inside[name] = is_declared or is_inside.get(around, False)
        setting = own or (None if is_declared else passed_on.get(around))
        setting = setting or (_SECOND if is_inside[name] else _FIRST)
        # Whatever attention gets itself, its rule gives its projection (T, B, d).
        has_rule = isinstance(module, _ATTENTION) and calls_forward_of(type(module), _ATTENTION)
        passed_on[name] = _SECOND if has_rule else own
        if not any(listed is setting for listed in settings[module]):
            settings[module].append(setting)
    return {module: shared for module, shared in settings.items() if shared != [_FIRST]}


def _find_setting(module: nn.Module) -> nn.Module | None:
    path = next((_SETTING_IN[name] for name in class_names(module) if name in _SETTING_IN), None)
    if path is None:
        return None
    try:
        inner = module.get_submodule(path)
    except AttributeError:  # a layer of another class
        return None
    return inner if hasattr(inner, "batch_first") else None


def is_second(layer: nn.Module, settings: Settings) -> bool:
    """Tell whether a layer has the batch second now; ``UnsupportedError`` if settings differ."""
    is_first = {bool(setting.batch_first) for setting in settings}
    if len(is_first) > 1:
        raise UnsupportedError(
            f"{type(layer).__name__} is shared by modules of which one has the batch on the first "
            "axis and another on the second; give each a layer of its own"
        )
    return is_first == {False}


def describe(settings_of: Mapping[nn.Module, Settings]) -> set[str]:
    """Tell the present settings; where one changes, the next batch is verified again."""
    return {
        f"{type(layer).__name__} {number} has batch_first={[each.batch_first for each in settings]}"
        for number, (layer, settings) in enumerate(settings_of.items())
    }


def run_tokenwise(
    rule: Callable[..., Tensor],
    widths: int,
    settings: Settings,
    layer: nn.Module,
    receive: Receive,
    *inputs: Any,
    **named: Any,
) -> Tensor:
    """Run a layer that does the same to every token, and turn what it contributes.

    Its rule takes the first axis for the batch; ``widths`` axes of its input make a token, beside
    which there must be a second axis (``ValueError``), and it may get nothing else
    (``UnsupportedError``).
    """
    if not is_second(layer, settings):
        return rule(layer, receive, *inputs, **named)
    name = type(layer).__name__
    arguments: Mapping[Any, Any] = {**dict(enumerate(inputs)), **named}
    if len(arguments) != 1:
        raise UnsupportedError(
            f"{name} has the batch on its second axis, and gets more than its input; give it the "
            "batch first, and leave it out of batch_second"
        )
    (x,) = arguments.values()
    if x.dim() < 2 + widths:
        raise ValueError(
            f"{name} has the batch on its second axis, and got {tuple(x.shape)}, which has no "
            "such axis; leave it out of batch_second"
        )
    return rule(layer, partial(receive_turned, receive, x.shape[1]), x)
