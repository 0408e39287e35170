"""The base of Opacus's methods that compute norms in one backward pass and the sum in a second.

The first pass computes each sample's norm. The second differentiates the loss with each sample
weighted by its clip factor. The graph is kept between them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.optim import Optimizer

from dpprof.experiments.records.terms import Component
from dpprof.private.allocation_marks import Function
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.opacus.opacus_step import OpacusStep
from dpprof.subjects.methods.opacus.refusals import tell_refusals
from dpprof.subjects.methods.training_step import Batch, Enter


class ReportsPhases:
    """Makes Opacus's modules report phases.

    ``DPTensorFastGradientClipping.backward`` calls these methods between its two passes.
    """

    enter: Enter

    def get_norm_sample(self) -> Tensor:
        """Return the norms of samples' gradients; (B,)."""
        self.enter("clip")
        norms_B: Tensor = super().get_norm_sample()  # type: ignore[misc] # of the other base
        return norms_B

    def disable_hooks(self) -> None:
        """Begin the second pass, which computes no norms."""
        self.enter("second_backward")
        super().disable_hooks()  # type: ignore[misc]


class _PhasedModule(ReportsPhases, GradSampleModuleFastGradientClipping):
    pass


class OpacusTwoPass(OpacusStep):
    """Two passes of ``DPLossFastGradientClipping`` and a step of its optimizer."""

    use_ghost_clipping: bool
    """Whether norms of linear layers and embeddings need no per-sample gradients."""

    module_type: type[AbstractGradSampleModule] = _PhasedModule
    """The wrapper of the model, of Opacus's that compute norms."""

    criterion_type: type[DPLossFastGradientClipping] = DPLossFastGradientClipping
    """The wrapper of the loss, whose ``backward`` makes both passes."""

    grad_sample_mode = "ghost"
    accumulates: ClassVar[bool] = True
    optimizer: DPOptimizerFastGradientClipping
    births: ClassVar[Mapping[Function, Component]] = {
        **OpacusStep.births,
        GradSampleModuleFastGradientClipping.get_norm_sample: "norm_samples",
    }

    def wrap(self, model: nn.Module) -> AbstractGradSampleModule:
        """Wrap the model so that its backward pass finds norms."""
        return self.module_type(
            model,
            batch_first=True,
            loss_reduction="mean",
            max_grad_norm=self.experiment.max_grad_norm,
            use_ghost_clipping=self.use_ghost_clipping,
        )

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer and the loss as ``PrivacyEngine.make_private`` does."""
        self.wrap_optimizer(optimizer)
        self.criterion: Any = self.criterion_type(
            self.module, self.optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean"
        )

    @tell_refusals()
    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        After "noise" follow the calls of the optimizer's ``step``, in its order.
        """
        self.module.enter = enter
        for part in reversed(range(self.experiment.accumulation)):
            enter("forward")
            loss = self._lose(batch)
            enter("backward")
            loss.backward()
            if not part:
                enter("noise")
            self.optimizer.accumulate()
            self.optimizer._is_last_step_skipped = part > 0  # noqa: SLF001 (as its step does)
            if part:
                self.optimizer.zero_grad()
        self.add_noise()

    def _lose(self, batch: Batch) -> Any:
        """Return a batch's losses, whose ``backward`` makes both passes."""
        logits = self.module(*batch.inputs)
        if logits.dim() == 1:
            raise UnsupportedError(
                f"{self.experiment.method} computes the loss itself, cross-entropy of logits, and "
                "the model comes with a loss of its own"
            )
        # Of samples that have classes, the criterion's losses are those of samples already.
        shape = {"shape": logits.shape} if batch.labels.dim() > 1 else {}
        return self.criterion(logits.flatten(0, -2), batch.labels.flatten(), **shape)

    def sample_norms(self) -> Tensor:
        """Return the norms of the first pass; (B,)."""
        norms_B: Tensor = self.module.per_sample_gradient_norms
        return norms_B
