"""The parts of each Poisson batch as one element of a loader: a ``Trainer`` takes a step for it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from dpprof.private.loop.captured_parts import Part
from dpprof.private.loop.poisson_batches import PoissonLoader


class JoinedParts:
    """Joins the parts of a batch: a ``Trainer`` takes one step for each element.

    The loader may be ahead of the steps taken, where a state is not to be saved. ``device`` is
    that of the tensor by which ranks agree on the number of parts; None where they do not wait.
    """

    def __init__(self, loader: PoissonLoader, device: torch.device | None) -> None:
        self.loader = loader
        self.dataset = range(loader.numbers.samples)  # whose length the Trainer asks for
        self._device = device
        self.handed = 0  # batches that were handed out; and those before this run
        self.most: int | None = None  # how many a run has; it may be over when it is resumed

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.most is not None and self.handed >= self.most:
            return
        parts: list[tuple[Any, Part]] = []
        for batch, part in self.loader.parts():
            parts.append((batch, part))
            if part.is_last:
                self.handed += 1
                yield {"parts": parts if self._device is None else self._fill_up(parts)}
                parts = []

    def _fill_up(self, parts: list[tuple[Any, Part]]) -> list[tuple[Any, Part]]:
        """Add parts without samples, until there are as many as on the rank with the most."""
        most = torch.tensor(len(parts), device=self._device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        batch, part = parts[-1]
        filled = parts + [(batch, part._replace(is_empty=True))] * (int(most) - len(parts))
        return [(b, p._replace(is_last=at == len(filled))) for at, (b, p) in enumerate(filled, 1)]
