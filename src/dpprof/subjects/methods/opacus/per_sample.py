"""The base of Opacus's methods that compute per-sample gradients, clip them and sum them.

They differ in how they compute per-sample gradients, and share ``DPOptimizer``. Memory: B x P
elements of per-sample gradients and P of their clipped sum, which costs 2 B d p FLOPs for a linear
layer of d x p.
"""

from collections.abc import Collection
from typing import ClassVar

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.utils import wrap_model
from torch import Tensor, nn

from dpprof.subjects.methods.losses import losses_of
from dpprof.subjects.methods.opacus.opacus_step import OpacusStep
from dpprof.subjects.methods.opacus.refusals import tell_refusals
from dpprof.subjects.methods.training_step import Batch, Enter


class OpacusPerSample(OpacusStep):
    """A step of ``DPOptimizer``."""

    accumulates: ClassVar[bool] = True
    losses: ClassVar[Collection[str]] = ("cross-entropy", "labels", "sum-of-logits")

    def wrap(self, model: nn.Module) -> AbstractGradSampleModule:
        """Wrap the model so that its backward pass leaves ``grad_sample``."""
        mode = self.grad_sample_mode
        return wrap_model(model, mode, batch_first=True, loss_reduction="mean")

    @tell_refusals()
    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        After "clip" follow the calls of the optimizer's ``step``, in its order.
        """
        for part in reversed(range(self.experiment.accumulation)):
            enter("forward")
            loss = losses_of(self, batch.labels, *batch.inputs).mean()
            enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            enter("clip")
            self.optimizer.clip_and_accumulate()
            self.optimizer._is_last_step_skipped = part > 0  # noqa: SLF001 (as its step does)
            if part:
                self.optimizer.zero_grad()
        enter("noise")
        self.add_noise()

    def sample_norms(self) -> Tensor:
        """Return the norms of the per-sample gradients; (B,)."""
        samples: list[Tensor] = self.optimizer.grad_samples
        norms = [gradients.flatten(1).norm(dim=1) for gradients in samples]
        norms_B: Tensor = torch.stack(norms).norm(dim=0)
        return norms_B
