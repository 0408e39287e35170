"""The equal blocks of a model: which they are, and the same model with fewer of them."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import Dimensions
from dpprof.subjects.models.build import build_model, find_recipe

_PLAIN = (bool, int, float, str, type(None))
_OF_POSITION = ("layer_idx", "layer_id", "layer_number")
"""Attributes that only say which block a module is."""


class NotAlikeError(Exception):
    """Blocks cannot be taken for one another; the message says why."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model."""

    container: str
    """The name of the module whose children they are."""

    count: int
    trained_bytes: int = 0
    """Bytes of all parameters of the model that are trained."""

    frozen_bytes: int = 0
    """Bytes of all other parameters, in the format in which they are stored."""

    def split(self, name: str | None) -> tuple[str | None, int | None]:
        """Return a module's name with a gap in place of its block's number, and the number.

        Example:
            >>> Blocks("blocks", 12).split("blocks.7.mlp")
            ('blocks.{}.mlp', 7)
        """
        start = self.container + "."
        if name is None or not name.startswith(start):
            return name, None
        number, dot, rest = name.removeprefix(start).partition(".")
        return (f"{start}{{}}{dot}{rest}", int(number)) if number.isdecimal() else (name, None)


def join(name: str | None, block: int | None) -> str | None:
    """Put a block's number into the gap that ``Blocks.split`` left."""
    return name if name is None or block is None else name.replace("{}", str(block), 1)


@functools.lru_cache(maxsize=8)
def find_blocks(experiment: Experiment) -> Blocks:
    """Find the blocks of an experiment's model, and compare them.

    They must have the same layers, shapes, flags and trained parameters, and no list in the config
    may say something different of each.

    Raises:
        NotAlikeError: They differ, or the model has no blocks that are known.
    """
    recipe = find_recipe(experiment)
    if experiment.checkpointed_share < 1:
        raise NotAlikeError("some blocks are checkpointed")
    if not isinstance(recipe, Dimensions | Architecture):
        raise NotAlikeError("a function builds the model")  # which may need its elements
    with torch.device("meta"):
        model = build_model(experiment)
    if isinstance(recipe, Dimensions):
        container, count = "blocks", recipe.layers
    else:
        config = _read_config(recipe)
        if not hasattr(config, "num_hidden_layers"):
            raise NotAlikeError("its config counts stages, and no blocks")
        _refuse_lists(config)
        count = config.num_hidden_layers
        lists = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if len(lists) != 1:
            raise NotAlikeError(f"the model has {len(lists)} lists of {count} layers")
        [container] = lists
    first, *others = model.get_submodule(container).children()
    described = list(_describe(first))
    for number, other in enumerate(others, start=1):
        if list(_describe(other)) != described:
            raise NotAlikeError(f"block {number} is not like block 0")
    held: Counter[bool] = Counter()
    for parameter in model.parameters():
        held[parameter.requires_grad] += parameter.nbytes
    return Blocks(container, count, held[True], held[False])


def with_blocks(experiment: Experiment, count: int) -> Experiment:
    """Return an experiment whose model has another number of blocks."""
    recipe = find_recipe(experiment)
    if isinstance(recipe, Dimensions):
        return experiment.model_copy(update={"model": recipe.model_copy(update={"layers": count})})
    config, settings = _read_config(recipe), recipe.config
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            settings[key] = value[:count]
    named = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    settings[named if named in settings else "num_hidden_layers"] = count
    model = Architecture(hf=recipe.hf, task=recipe.task, **settings)
    return experiment.model_copy(update={"model": model})


def _read_config(architecture: Architecture) -> Any:
    from dpprof.subjects.models.hugging_face import read_config  # noqa: PLC0415 (an extra)

    return read_config(architecture)


def _refuse_lists(config: Any) -> None:
    """Refuse a config with a list that tells blocks apart."""
    for name, value in config.to_dict().items():
        if not isinstance(value, list | tuple) or not value:
            continue
        is_of_each = len(value) == config.num_hidden_layers
        if is_of_each and any(item != value[0] for item in value):
            raise NotAlikeError(f"{name} differs from block to block")
        if not is_of_each and "layer" in name:
            raise NotAlikeError(f"{name} names some of the blocks")


def _describe(block: nn.Module) -> Iterator[Any]:
    """Yield all that two blocks must have in common."""
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN) and key not in _OF_POSITION
        }
        yield name, type(module), plain
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        yield name, tensor.shape, tensor.dtype, tensor.requires_grad
