"""Gradients that a clipping left: known again, as long as nobody changed them.

A parameter's ``.grad`` is anybody's to write. A step is private only if what it applies is the
clipped sum, so each sum is marked with its version and with the bound that it was clipped to.
"""

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import Contribution

_MARK = "_clipped"


def mark(gradient: Tensor, bound: float) -> None:
    """Mark a sum as clipped to a bound, and as it is now."""
    setattr(gradient, _MARK, (gradient._version, bound))  # noqa: SLF001


def bound_of(gradient: Tensor) -> float | None:
    """Tell the bound that a gradient was clipped to; None if it is no sum, or was changed since."""
    version, bound = getattr(gradient, _MARK, (None, None))
    return bound if version == gradient._version else None  # noqa: SLF001


@torch.no_grad()
def sum_up(
    parameter: nn.Parameter, contribution: Contribution, factors_B: Tensor, bound: float
) -> None:
    """Add the weighted sum of what a share adds to ``.grad``."""
    found = contribution.sum(factors_B.to(contribution[0].device))
    gradient = found.view_as(parameter).to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    mark(parameter.grad, bound)
