"""Refuses hooks and optimizers that would handle the gradients of trained parameters in backward.

Autograd computes no gradient of most clipped parameters, so a hook on one does not run. Where it
computes one, of a parameter that a module without a rule holds, that is the sum over samples
without clipping and noise, and an optimizer that steps in backward would apply it. Hooks on modules
and on activations stay.

Hooks on the nodes of autograd that accumulate gradients are not seen: PyTorch does not list them.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from dpprof.private.errors import UnsupportedError

_KINDS = {
    "_backward_hooks": "a hook on its gradient (register_hook)",
    "_post_accumulate_grad_hooks": (
        "a hook behind its gradient (register_post_accumulate_grad_hook), as optimizers have that "
        "step in backward"
    ),
}

_STEPS = "_in_backward_optimizers"


class Looking(partial[None]):
    """A hook that only looks at gradients, as instruments do; it may stay."""


def refuse_hooks(name: str, parameter: nn.Parameter, own: Iterable[Any] = ()) -> None:
    """Refuse hooks, but the ``own``, and optimizers that get a parameter's gradient in backward."""
    own_ids = {handle.id for handle in own}
    others = [
        what
        for kind, what in _KINDS.items()
        for key, hook in (getattr(parameter, kind) or {}).items()
        if key not in own_ids and not isinstance(hook, Looking)
    ]
    if getattr(parameter, _STEPS, None):
        others = ["an optimizer that steps in backward (_apply_optimizer_in_backward)"]
    if others:
        raise UnsupportedError(
            f"{name} is trained and has {others[0]}, which clipping does not run; remove it and "
            "step with a NoisyOptimizer, or freeze the parameter"
        )
