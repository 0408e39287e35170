"""Opacus's per-sample gradients from backward hooks, clipped and summed.

``GradSampleModule`` and ``DPOptimizer``. Cost per linear layer of d x p over standard's
6 B T d p FLOPs: 2 B T d p for per-sample gradients (the ordinary gradient is computed
too) and 2 B d p for the clipped sum. Memory: B x P elements of per-sample gradients.
"""

from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from dpprof.experiment import Experiment
from dpprof.methods.base import Batch, Enter, TrainingStep, mean_loss
from dpprof.methods.opacus_optimizer import wrap_optimizer


class OpacusHooks(TrainingStep):
    """``grad_sample_mode="hooks"``.

    Formal guarantees: those of Opacus's flat clipping, L2 sensitivity ``max_grad_norm``
    under adding or removing one sample.
    """

    optimizer: DPOptimizer

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        super().__init__(model, experiment)
        self.module = GradSampleModule(model, batch_first=True, loss_reduction="mean")

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer in Opacus's ``DPOptimizer``."""
        self.optimizer = wrap_optimizer(DPOptimizer, optimizer, self.experiment)

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        From "clip" on these are the calls of ``DPOptimizer.pre_step``, in its order.
        """
        enter("forward")
        loss = mean_loss(self.module(batch.tokens_BT), batch.labels_BT)
        enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        enter("clip")
        self.optimizer.clip_and_accumulate()
        enter("noise")
        self.optimizer.add_noise()
        self.optimizer.scale_grad()

    def apply_gradient(self) -> None:
        """Let the wrapped optimizer use the gradients."""
        self.optimizer.original_optimizer.step()
