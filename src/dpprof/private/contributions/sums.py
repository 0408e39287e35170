"""The clipped sums of a batch, which have no noise yet.

They belong to the engine. Where a ``NoisyOptimizer`` is attached, nothing else holds them: its
step adds noise to them, and only then puts them into ``.grad``. So hooks, callbacks, other
optimizers and whoever saves the model find no gradient until there is one that may be published.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpprof.private.norms import placement


def own_part(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor``, or the whole of another gradient."""
    shard: Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's clipped sum: at least float32.

    Rounded to 16 bits before noise, it could move by more than one sample contributes.
    """
    return torch.promote_types(parameter.dtype, torch.float32)


SMALL = 2**12  # the most elements of a sum that is processed together with others


def group_small(sums: Sequence[Tensor]) -> list[list[int]]:
    """Group sums, by their places, so that each small one on CUDA is not a launch of its own.

    Others stay alone; all small ones of a dtype and device are one group, so that its size grows
    evenly with the blocks of a model.
    """
    groups: list[list[int]] = []
    small: dict[Any, list[int]] = {}
    for place, summed in enumerate(sums):
        kind = summed.dtype, summed.device
        if summed.numel() > SMALL or not placement.is_cuda(summed):
            groups.append([place])
        elif kind in small:
            small[kind].append(place)
        else:
            small[kind] = [place]
            groups.append(small[kind])
    return groups


class ClippedSums:
    """The sums of one batch, by parameter."""

    def __init__(self) -> None:
        self.owner: object | None = None
        """The ``NoisyOptimizer`` that takes them; without one ``backward`` puts them into
        ``.grad``."""

        self.part: dict[nn.Parameter, Tensor] = {}  # what was clipped since the last step
        self.total: dict[nn.Parameter, Tensor] = {}  # of the batch's parts that had a step
        self.bound: float | None = None  # the C of the batch; None before its first part

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Begin a batch of its own within; what is here now comes back at the end."""
        kept = dict(vars(self))
        vars(self).update(vars(ClippedSums()))
        try:
            yield
        finally:
            vars(self).update(kept)

    def begin(self, bound: float) -> None:
        """Begin to clip a part of a batch, to the bound of the parts before (``RuntimeError``).

        What is left of a part that was interrupted does not count: no batch was noted for it.
        """
        self.refuse_other_bound(bound)
        self.part.clear()
        self.bound = bound

    def refuse_other_bound(self, bound: float) -> None:
        """Refuse another bound than that of the sums that are there (``RuntimeError``)."""
        if self.bound not in (None, bound):
            raise RuntimeError(
                f"max_grad_norm changed from {self.bound} to {bound} between the parts of a batch, "
                "or between backward and step; change it after a step"
            )

    def add(self, parameter: nn.Parameter, summed: Tensor) -> None:
        """Add a sum over samples."""
        before = self.part.get(parameter)
        if before is None:
            self.part[parameter] = summed
        else:
            own_part(before).add_(own_part(summed))

    @torch.no_grad()
    def give(self) -> None:
        """Add the sums to ``.grad``, as autograd does."""
        for parameter, summed in self.part.items():
            if parameter.grad is not None:
                own_part(parameter.grad).add_(own_part(summed))
                continue
            if summed.dtype != parameter.dtype:
                parameter.grad_dtype = None  # any
            parameter.grad = summed
        self.forget()

    @torch.no_grad()
    def close_part(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the part to the total, with zeros for parameters that no sample used."""
        for parameter in parameters:
            summed, before = self.part.pop(parameter, None), self.total.get(parameter)
            if before is None:
                if summed is None:
                    summed = torch.zeros_like(parameter, dtype=dtype_of_sum(parameter))
                self.total[parameter] = summed
            elif summed is not None:
                before += summed
        self.part.clear()

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Return the total, and forget it."""
        total, self.total = self.total, {}
        self.forget()
        return total

    def forget_part(self) -> None:
        """Forget what was clipped since the last step."""
        self.part.clear()
        if not self.total:
            self.bound = None

    def forget(self) -> None:
        """Forget the whole batch."""
        self.part.clear()
        self.total.clear()
        self.bound = None

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError("clipped sums without noise cannot be copied or saved; copy the model")


def refuse_gradients(
    parameters: Iterable[nn.Parameter], name_of: Callable[[nn.Parameter], str]
) -> None:
    """Refuse gradients where sums with noise will go (``RuntimeError``), and clear zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if own_part(parameter.grad).any():
            raise RuntimeError(
                f"{name_of(parameter)} has a gradient, such as the last step's or one that was "
                "written by hand; the step puts the clipped and noised sum there: call "
                "optimizer.zero_grad() after each step, and leave .grad alone before it"
            )
        parameter.grad = None
