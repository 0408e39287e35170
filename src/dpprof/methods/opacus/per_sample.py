"""The base of Opacus's methods that compute per-sample gradients, clip them and sum them.

They differ in how they compute per-sample gradients, and share ``DPOptimizer``. Memory: B x P
elements of per-sample gradients and P of their clipped sum, which costs 2 B d p FLOPs for a linear
layer of d x p.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from torch import Tensor, nn
from torch.optim import Optimizer

from dpprof.methods.opacus.opacus_step import OpacusStep
from dpprof.methods.opacus.padded_lookups import leave_padding_out
from dpprof.methods.opacus.path_watchers import watch_hooks
from dpprof.methods.opacus.refusals import tell_refusals
from dpprof.methods.training_step import Batch, Enter, mean_loss
from dpprof.norms.code_paths import Watch
from dpprof.spec.experiment import Experiment


class OpacusPerSample(OpacusStep):
    """A step of ``DPOptimizer`` on a model that Opacus wraps.

    Formal guarantees: as of Opacus's flat clipping, L2 sensitivity ``max_grad_norm`` under adding
    or removing one sample.

    Raises:
        UnsupportedError: Opacus refuses the model, here or in its first step.
    """

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        super().__init__(model, experiment)
        with tell_refusals():
            self.module = self.wrap(model)
        leave_padding_out(self.module)

    @staticmethod
    @abstractmethod
    def wrap(model: nn.Module) -> AbstractGradSampleModule:
        """Wrap the model so that its backward pass leaves ``grad_sample``."""

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer in Opacus's."""
        self.wrap_optimizer(optimizer)

    @tell_refusals()
    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        After "clip" follow the calls of the optimizer's ``step``, in its order.
        """
        enter("forward")
        loss = mean_loss(self.module(*batch.inputs), batch.labels_BT)
        enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        enter("clip")
        self.optimizer.clip_and_accumulate()
        enter("noise")
        self.add_noise()

    def sample_norms(self) -> Tensor:
        """Return the norms of the per-sample gradients; (B,)."""
        samples: list[Tensor] = self.optimizer.grad_samples
        norms = [one.flatten(1).norm(dim=1) for one in samples]
        norms_B: Tensor = torch.stack(norms).norm(dim=0)
        return norms_B

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:
        """Watch Opacus's hooks."""
        assert isinstance(self.module, GradSampleModule)
        return watch_hooks(self.module, watch)
