"""Lets schedulers step once for each batch, where a loop over its parts steps them for each part.

How many parts a batch has depends on how many samples were drawn, and no schedule should. PyTorch
has no hook for the steps of schedulers, as it has for those of optimizers. So ``step`` of their
classes does nothing until the last part, for every way to make a scheduler, to save it, and to call
it. Anything else that a loop does once for each batch asks ``is_last_part``.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

NOISY = "_noisy_optimizer"  # the attribute of an optimizer with the ``NoisyOptimizer`` around it

_BASES = {
    "torch.optim.lr_scheduler": "LRScheduler",
    "transformers.optimization": "GreedyLR",
    "opacus.schedulers.noise_scheduler": "_NoiseScheduler",
    "opacus.schedulers.grad_clip_scheduler": "_GradClipScheduler",
}
"""The first class of each family of schedulers, by its module, which need not be imported."""

_REPLACED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # took the place of a ``step``


def keep_to_batches() -> None:
    """Let schedulers, of every class that there is by now, step once for each batch."""
    for module, base in _BASES.items():
        if hasattr(sys.modules.get(module), base):
            _replace_steps(getattr(sys.modules[module], base))


def _replace_steps(scheduler: type[Any]) -> None:
    if scheduler.step not in _REPLACED:
        scheduler.step = _once_a_batch(scheduler.step)
    for derived in scheduler.__subclasses__():
        _replace_steps(derived)


def _once_a_batch(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_once(scheduler: Any, *inputs: Any, **named: Any) -> Any:
        return None if _awaits_last_part(scheduler) else step(scheduler, *inputs, **named)

    _REPLACED.add(step_once)
    return step_once


def _awaits_last_part(scheduler: Any) -> bool:
    """Tell whether more parts of a batch follow; a scheduler that is being made takes its step."""
    # PyTorch's say so themselves; their classes need not count in last_epoch.
    if getattr(scheduler, "_is_initial", getattr(scheduler, "last_epoch", None) == -1):
        return False
    optimizer = getattr(scheduler, "optimizer", None)
    return not getattr(getattr(optimizer, NOISY, optimizer), "is_last_part", True)
