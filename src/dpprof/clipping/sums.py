"""Marks clipped sums, to recognise them as long as nothing changes them.

Any code may write a parameter's ``.grad``. A step is private only if it applies the clipped sum,
so each sum is marked with its version counter and the bound that it was clipped to.
"""

from collections.abc import Callable, Iterable

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


def refuse_other_sums(
    parameters: Iterable[nn.Parameter], bound: float, name_of: Callable[[nn.Parameter], str]
) -> None:
    """Refuse to add to a ``.grad`` that is no clipped sum to this bound; clear zeros.

    Raises:
        RuntimeError: There is one.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or bound_of(gradient) == bound:
            continue
        if bound_of(gradient) is None and not own_part(gradient).any():
            parameter.grad = None
            continue
        raise RuntimeError(
            f"{name_of(parameter)} has a gradient that is not a sum of this clipping, or was "
            "clipped to another bound, such as the last step's; call optimizer.zero_grad() after "
            "each step"
        )


def refuse_unclipped(
    parameters: Iterable[nn.Parameter], name_of: Callable[[nn.Parameter], str]
) -> None:
    """Refuse to end a backward that left anything but clipped sums.

    Raises:
        RuntimeError: It did.
    """
    for parameter in parameters:
        if parameter.grad is not None and bound_of(parameter.grad) is None:
            raise RuntimeError(
                f"{name_of(parameter)} has a gradient that is not clipped; call backward(losses) "
                "of the Clipping alone"
            )
