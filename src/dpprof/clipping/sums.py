"""Marks clipped sums, to recognise them as long as nothing changes them.

Any code may write a parameter's ``.grad``. A step is private only if it applies the clipped sum,
so each sum is marked with its version counter and the bound that it was clipped to.
"""

import torch
from torch import Tensor, nn

_MARK = "_clipped"


def _version(gradient: Tensor) -> tuple[int, int, torch.dtype]:
    """Return a gradient's version, that of this rank's shard of a ``DTensor``, and the dtype.

    Converting a module writes ``.grad.data``, which leaves versions as they are.
    """
    return gradient._version, own_part(gradient)._version, gradient.dtype  # noqa: SLF001


def own_part(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor``, or the whole of another gradient."""
    shard: Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard


def bound_of(gradient: Tensor) -> float | None:
    """Return the bound of a clipped sum; None if it is another gradient, or changed since."""
    version, bound = getattr(gradient, _MARK, (None, None))
    return bound if version == _version(gradient) else None


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's clipped sum: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


@torch.no_grad()
def add_to_grad(parameter: nn.Parameter, summed: Tensor, bound: float) -> None:
    """Add a clipped sum to ``.grad``, and mark that.

    That of a parameter in 16 bits is in float32, until noise was added: rounded to 16 bits, it
    could move by more than one sample contributes.
    """
    if parameter.grad is None:
        if summed.dtype != parameter.dtype:
            parameter.grad_dtype = None
        parameter.grad = summed
    elif bound_of(parameter.grad) != bound:
        raise RuntimeError(
            "a gradient that is not clipped was found where the clipped sum goes; clear gradients"
        )
    else:
        own_part(parameter.grad).add_(own_part(summed))
    setattr(parameter.grad, _MARK, (_version(parameter.grad), bound))
