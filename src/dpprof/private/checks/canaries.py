"""Canaries: samples of which each is in the data if a fair coin says so, through the user's loop.

A canary in gradients has a coordinate of its own in a vector that is added to the model. Its loss
is a large multiple of that coordinate, so that its gradient, clipped, is the bound in that
coordinate and 0 elsewhere: no sample is easier to tell. A canary in the data is a sample like
others. One whose coin says no stays in its place with a loss of 0, so that the number of samples
follows from no coin.

Shape legend: B samples of a batch, m canaries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

MARK = "canary"
"""The name of a sample's mark where samples are mappings; in others it is the last entry.

It is 0 for an ordinary sample, at + 1 for a canary in the data, -(at + 1) for one that is not.
"""

_SCALE = 1e12  # of a canary's loss over its coordinate: its gradient exceeds any bound
LossesOf = Callable[..., Tensor]  # from ``(model, *batch)`` to the losses of samples, (B,)


class WithCanaries(nn.Module):
    """A trained model with a number of its own for each of m canaries; all else is the model's."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        like = next((p for p in model.parameters() if p.requires_grad), torch.zeros(0))
        dtype = torch.promote_types(like.dtype, torch.float32)  # 16 bits have no such gradients
        self.canaries: nn.Embedding = nn.Embedding(count, 1, device=like.device, dtype=dtype)
        nn.init.zeros_(self.canaries.weight)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        return self.model(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, where this has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class MarkedSamples(Dataset[Any]):
    """The user's samples, then one for each canary, all with their marks.

    ``data`` has tuples, lists, mappings or single objects. All m canaries are marked: by those
    of ``canaries`` in turn, and by the coins ``included``, (m,) bool.
    """

    def __init__(self, data: Any, canaries: Any, included: Tensor) -> None:
        self._data, self._canaries = data, canaries
        self._marks = [at if coin else -at for at, coin in enumerate(included.tolist(), start=1)]

    def __len__(self) -> int:
        return len(self._data) + len(self._marks)

    def __getitem__(self, at: int) -> Any:
        at, mark = range(len(self))[at] - len(self._data), 0
        sample = self._data[at] if at < 0 else self._canaries[at % len(self._canaries)]
        if at >= 0:
            mark = self._marks[at]
        if isinstance(sample, Mapping):
            return {**sample, MARK: mark}
        return (*sample, mark) if isinstance(sample, tuple | list) else (sample, mark)


def split_mark(batch: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any, Tensor]:
    """Return what a loss is given, without marks, and the marks, (B,)."""
    if MARK in named:
        return batch, {key: part for key, part in named.items() if key != MARK}, named[MARK]
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        inputs = {key: part for key, part in batch[0].items() if key != MARK}
        return (inputs,), named, batch[0][MARK]
    *parts, mark = batch
    return parts, named, mark


def with_gradients(losses_of: LossesOf, vector: nn.Embedding) -> LossesOf:
    """Make the losses of canaries large multiples of their coordinates of a vector."""

    def compute(model: nn.Module, *batch: Any, **named: Any) -> Tensor:
        parts, others, mark_B = split_mark(batch, named)
        losses_B = losses_of(model, *parts, **others)
        mark_B = mark_B.to(losses_B.device)
        own_B: Tensor = vector((mark_B.abs() - 1).clamp(min=0))[:, 0]
        own_B = _SCALE * own_B.to(losses_B.dtype) * (mark_B > 0)
        of_others_B = torch.where(mark_B == 0, losses_B, torch.zeros_like(losses_B))
        return of_others_B + own_B

    return compute


def with_coins(losses_of: LossesOf) -> LossesOf:
    """Make the losses of canaries 0 that are not in the data."""

    def compute(model: nn.Module, *batch: Any, **named: Any) -> Tensor:
        parts, others, mark_B = split_mark(batch, named)
        losses_B = losses_of(model, *parts, **others)
        is_out_B = mark_B.to(losses_B.device) < 0
        return torch.where(is_out_B, torch.zeros_like(losses_B), losses_B)

    return compute


@contextmanager
def adding_up_releases(vector: nn.Embedding) -> Iterator[Tensor]:
    """Add up the gradients of a vector that any optimizer steps on, by a hook; (m,), in float64."""
    weight = vector.weight
    total_m = torch.zeros(len(weight), dtype=torch.float64)

    def add(optimizer: Optimizer, *_: Any) -> None:
        trained = (p for group in optimizer.param_groups for p in group["params"])
        if weight.grad is not None and any(p is weight for p in trained):
            total_m.add_(weight.grad[:, 0].detach().double().cpu())

    hook = register_optimizer_step_pre_hook(cast("Any", add))
    try:
        yield total_m
    finally:
        hook.remove()
