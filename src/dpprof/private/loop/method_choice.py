"""The method that ``make_private`` takes by itself, chosen by who can predict steps.

Predictions are no part of this library. A package that has some names a function in its entry
points, in the group ``dpprof.private`` under ``choose_method``.
"""

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

DEFAULT = "flash-bk"
"""It is the faster one of nearly every model on nearly every GPU."""

_log = logging.getLogger("dpprof")


class FirstBatch(NamedTuple):
    """A batch, and what computes its losses."""

    losses_of: Callable[..., Tensor]
    """From the batch's parts to the losses, (B,)."""

    batch: Sequence[Any]
    """Its parts, samples first."""

    samples: int


def choose_method(
    model: nn.Module, optimizer: Optimizer, draw: Callable[[], FirstBatch] | None, batch_size: int
) -> str:
    """Return the method that is predicted to be the fastest that fits on the model's GPU.

    Args:
        model: On its device, before any clipping.
        optimizer: Of its parameters.
        draw: Returns a batch of any number of samples; None where its losses are not known.
        batch_size: The samples of a step.

    Returns:
        A key of ``METHODS``. A line of the logger ``dpprof`` says why.
    """
    for chooser in entry_points(group="dpprof.private", name="choose_method"):
        return str(chooser.load()(model, optimizer, draw, batch_size))
    _log.info("method %s: the default, since nothing that predicts steps is installed", DEFAULT)
    return DEFAULT
