"""Refuses rotary positions whose frequencies follow the longest sample of a batch.

transformers computes the frequencies of ``dynamic`` and ``longrope`` anew from the largest position
of a batch (``modeling_rope_utils.dynamic_rope_update``). One long sample then changes the gradients
of all others, and no clipping bounds that.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dpprof.private.errors import UnsupportedError

_SETTINGS = ("rope_parameters", "rope_scaling")
_TYPES = ("rope_type", "type")
_PAIRS = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))  # for short, long ones


def refuse_positions(model: nn.Module) -> None:
    """Refuse a model with such positions (``UnsupportedError``)."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        for kind in _find_types(config):
            where = f"{name or type(module).__name__}.config"
            raise UnsupportedError(
                f"{where} has positions of rope_type {kind!r}, whose frequencies follow the "
                "longest sample of a batch, so that it changes the gradients of all others; before "
                "the model is made, set rope_type to 'yarn', 'linear', 'llama3' or 'default'"
                + (", or short_factor to the values of long_factor" if kind == "longrope" else "")
            )


def _find_types(config: Any) -> Iterator[str]:
    """List the types of positions that follow the batch, also of single kinds of layers."""
    own: list[Any] = [getattr(config, name, None) for name in _SETTINGS]
    while own:
        settings = own.pop()
        if not isinstance(settings, Mapping):
            continue
        own += settings.values()
        kind = next((settings[name] for name in _TYPES if settings.get(name)), "")
        if not isinstance(kind, str):
            continue
        is_one = kind == "longrope" and all(
            settings.get(short) == settings.get(long) for short, long in _PAIRS
        )
        if ("dynamic" in kind or kind in {"longrope", "su"}) and not is_one:
            yield kind
