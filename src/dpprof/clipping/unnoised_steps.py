"""Refuses steps of other optimizers on clipped sums, which have no noise yet.

A second optimizer of the same parameters, or one of an earlier loop, would apply the sums that wait
in ``.grad`` between ``backward`` and the private step. PyTorch calls one hook before every step of
every optimizer.
"""

import functools
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dpprof.clipping.sums import bound_of

AWAITS_NOISE = "_awaits_noise"
"""Set on every parameter whose clipping has a ``NoisyOptimizer``."""


@functools.cache
def refuse_unnoised_steps() -> None:
    """Watch all optimizers from now on."""
    register_optimizer_step_pre_hook(refuse_clipped_sums)


def refuse_clipped_sums(optimizer: Optimizer, *_: Any) -> None:
    """Refuse an optimizer's step if a parameter has a sum that a ``NoisyOptimizer`` adds noise to.

    Raises:
        RuntimeError: One has.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            awaits_noise = getattr(parameter, AWAITS_NOISE, False)
            if awaits_noise and parameter.grad is not None and bound_of(parameter.grad) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was asked to step on gradients without noise; "
                    "call step() of the NoisyOptimizer of these parameters, and of no other"
                )
