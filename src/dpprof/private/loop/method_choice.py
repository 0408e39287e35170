"""The method that ``make_private`` takes by itself, chosen by who can predict steps.

Predictions are no part of this library. A package that has some names a function in its entry
points, in the group ``dpprof.private`` under ``choose_method``.
"""

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpprof.private.samples.batches import give
from dpprof.private.samples.random_state import random_state_kept

DEFAULT = "flash-bk"  # it is the faster one of nearly every model on nearly every GPU

_log = logging.getLogger("dpprof")


class FirstBatch(NamedTuple):
    """A batch, and what computes its losses."""

    losses_of: Callable[..., Tensor]  # from the batch's parts to the losses, (B,)
    batch: Sequence[Any]  # its parts, samples first
    samples: int


def choose_method(
    model: nn.Module, optimizer: Optimizer, draw: Callable[[], FirstBatch] | None, batch_size: int
) -> str:
    """Return the method that is predicted to be the fastest that fits on the model's GPU.

    It is a key of ``METHODS``, and a line of the logger ``dpprof`` says why. ``draw`` returns a
    batch of any number of samples; None where its losses are not known.
    """
    for chooser in entry_points(group="dpprof.private", name="choose_method"):
        return str(chooser.load()(model, optimizer, draw, batch_size))
    _log.info("method %s: the default, since nothing that predicts steps is installed", DEFAULT)
    return DEFAULT


def draw_first(
    losses_of: Callable[..., Tensor], data_loader: DataLoader[Any], most: int
) -> FirstBatch:
    """Return a first batch as its parts, and the losses as a function of these."""
    with random_state_kept():
        drawn: list[int] = next(iter(cast("Any", data_loader.batch_sampler)), [])[:most]
        chosen = drawn if len(drawn) > 1 else range(min(2, len(cast("Any", data_loader.dataset))))
        few = DataLoader(
            data_loader.dataset, batch_sampler=[list(chosen)], collate_fn=data_loader.collate_fn
        )
        batch = next(iter(few))
    arguments, named = give(losses_of, batch)
    by_name = lambda *parts: losses_of(**dict(zip(named, parts, strict=True)))  # noqa: E731
    if named:
        return FirstBatch(by_name, list(named.values()), len(chosen))
    return FirstBatch(losses_of, arguments, len(chosen))
