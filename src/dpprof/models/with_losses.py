"""A model whose builder brings its loss and its batch, as one module.

Shape legend: B batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import EntryPointError, UnsupportedError


class WithLosses(nn.Module):
    """Maps a batch to the loss of each sample, (B,), in place of inputs to logits.

    Args:
        model: The model, which ``losses_of`` calls.
        losses_of: As ``Clipping.check`` takes it: maps a batch's tensors to losses, (B,).
        batch: Tensors with B samples each.
    """

    def __init__(
        self, model: nn.Module, losses_of: Callable[..., Tensor], batch: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self._losses_of, self._batch = losses_of, batch

    @classmethod
    def of(cls, parts: tuple[Any, ...], experiment: Experiment) -> Self:
        """Return the module of what a function has returned.

        Raises:
            EntryPointError: It is no model, function and batch.
        """
        model, losses_of, batch = parts if len(parts) == 3 else (None, None, None)  # noqa: PLR2004
        if isinstance(batch, Tensor):
            batch = (batch,)
        if not (
            isinstance(model, nn.Module)
            and callable(losses_of)
            and isinstance(batch, list | tuple)
            and batch
            and all(isinstance(one, Tensor) and one.dim() for one in batch)
        ):
            kinds = ", ".join(type(one).__name__ for one in parts)
            raise EntryPointError(
                "models",
                experiment.model_name
                if not isinstance(experiment.model, str)
                else experiment.model,
                f"returned ({kinds}), and the three are a torch.nn.Module, a function of the batch "
                "that returns each sample's loss, and a batch: tensors, samples first",
            )
        return cls(model, losses_of, batch)

    def forward(self, *batch: Tensor) -> Tensor:
        """Compute each sample's loss; (B,).

        Raises:
            UnsupportedError: There is not one loss for each sample.
        """
        losses_B = self._losses_of(*batch)
        if losses_B.shape != batch[0].shape[:1]:
            raise UnsupportedError(
                f"the loss has the shape {tuple(losses_B.shape)} for {len(batch[0])} samples; "
                "return one loss for each sample, without a mean over the batch"
            )
        return losses_B

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return so many samples of the batch; numbers that are not whole have ``dtype``.

        Raises:
            UnsupportedError: The batch has fewer samples.
        """
        least = min(len(one) for one in self._batch)
        if least < count:
            raise UnsupportedError(
                f"the function's batch has {least} samples, and {count} are asked for; make "
                "experiment.batch_size of them"
            )
        return [
            one[:count].to(device, dtype if one.is_floating_point() else one.dtype)
            for one in self._batch
        ]
