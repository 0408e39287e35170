"""A model whose builder brings its loss and its batch, as one module.

Shape legend: B batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpprof.experiments.config.registry import EntryPointError
from dpprof.private.errors import UnsupportedError


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
        self._batch = batch

        def losses_by(own: nn.Module, *tensors: Tensor) -> Tensor:
            if own is model:
                return losses_of(*tensors)
            # A copy: ``losses_of`` still calls the model that it was copied from.
            with standing_in(model, own):
                return losses_of(*tensors)

        self._losses_by = losses_by

    @classmethod
    def of(cls, parts: tuple[Any, ...], name: str) -> Self:
        """Return the module of what the function of a name has returned.

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
            and all(isinstance(tensor, Tensor) and tensor.dim() for tensor in batch)
        ):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise EntryPointError(
                "models",
                name,
                f"returned ({kinds}), and the three are a torch.nn.Module, a function of the batch "
                "that returns each sample's loss, and a batch: tensors, samples first",
            )
        return cls(model, losses_of, batch)

    def forward(self, *batch: Tensor) -> Tensor:
        """Compute each sample's loss; (B,).

        Raises:
            UnsupportedError: There is not one loss for each sample.
        """
        losses_B = self._losses_by(self.model, *batch)
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
        least = min(len(tensor) for tensor in self._batch)
        if least < count:
            raise UnsupportedError(
                f"the function's batch has {least} samples, and {count} are asked for; make "
                "experiment.batch_size of them"
            )
        return [
            tensor[:count].to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for tensor in self._batch
        ]


@contextmanager
def standing_in(model: nn.Module, twin: nn.Module) -> Iterator[None]:
    """Let each module of a model be its twin within, in calls and attributes, and restore it."""
    with ExitStack() as restored:
        for module, other in zip(list(model.modules()), list(twin.modules()), strict=True):
            attributes = vars(module)
            restored.callback(attributes.update, dict(attributes))
            restored.callback(attributes.clear)
            # Calls of the twin run its hooks.
            hooks = {name: type(own)() for name, own in vars(other).items() if "hooks" in name}
            attributes.clear()
            attributes.update({**vars(other), **hooks, "forward": other})
        yield
