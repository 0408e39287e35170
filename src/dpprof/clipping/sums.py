"""Marks clipped sums, to recognise them as long as nothing changes them.

Any code may write a parameter's ``.grad``. A step is private only if it applies the clipped sum,
so each sum is marked with its version counter and the bound that it was clipped to.
"""

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import Contribution

_MARK = "_clipped"


def mark(gradient: Tensor, bound: float) -> None:
    """Mark a gradient, in its present version, as a sum that was clipped to a bound."""
    setattr(gradient, _MARK, (gradient._version, bound))  # noqa: SLF001


def bound_of(gradient: Tensor) -> float | None:
    """Return the bound of a clipped sum; None if it is another gradient, or changed since."""
    version, bound = getattr(gradient, _MARK, (None, None))
    return bound if version == gradient._version else None  # noqa: SLF001


@torch.no_grad()
def add_clipped_sum(
    parameter: nn.Parameter, contribution: Contribution, factors_B: Tensor, bound: float
) -> None:
    """Add the sum of a contribution over samples, scaled by clipping factors, to ``.grad``."""
    summed = contribution.sum(factors_B.to(contribution[0].device))
    gradient = summed.view_as(parameter).to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    mark(parameter.grad, bound)
