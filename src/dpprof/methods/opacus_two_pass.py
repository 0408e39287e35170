"""Opacus's methods that find norms in one backward pass and the clipped sum in a second.

``GradSampleModuleFastGradientClipping``, its loss wrapper and its optimizer. The first
pass leaves each sample's norm, the second differentiates the loss with each sample
weighted by its clipping factor; the graph is kept in between.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.optim import Optimizer

from dpprof.methods.opacus_optimizer import ATTRIBUTES, BIRTHS, wrap_optimizer
from dpprof.methods.opacus_samplers import refuse_checkpointing, watch_hooks
from dpprof.methods.training_step import Batch, Enter, TrainingStep, Watch
from dpprof.records.births import Function
from dpprof.records.terms import Component
from dpprof.spec.experiment import Experiment

_BIRTHS: Mapping[Function, Component] = {
    **BIRTHS,
    GradSampleHooksFastGradientClipping.get_norm_sample: "norm_samples",
}


class _PhasedModule(GradSampleModuleFastGradientClipping):
    """Opacus's module, which says when its two-pass ``backward`` changes phase.

    The calls are those that ``DPTensorFastGradientClipping.backward`` makes between its
    passes; what they compute is left to Opacus.
    """

    enter: Enter

    def get_norm_sample(self) -> Tensor:
        self.enter("clip")
        norms_B: Tensor = super().get_norm_sample()
        return norms_B

    def disable_hooks(self) -> None:
        self.enter("second_backward")
        super().disable_hooks()


class OpacusTwoPass(TrainingStep):
    """Two passes of ``DPLossFastGradientClipping`` and one of its optimizer's steps.

    Formal guarantees: those of Opacus's flat clipping, L2 sensitivity ``max_grad_norm``
    under adding or removing one sample.
    """

    use_ghost_clipping: bool
    """Whether linear layers and embeddings find norms without per-sample gradients."""

    criterion_type: type[DPLossFastGradientClipping] = DPLossFastGradientClipping
    """What turns samples' losses into one whose ``backward`` makes both passes."""

    module: _PhasedModule
    optimizer: DPOptimizerFastGradientClipping
    attributes = ATTRIBUTES
    births = _BIRTHS

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        refuse_checkpointing(experiment)
        super().__init__(model, experiment)
        self.module = _PhasedModule(
            model,
            batch_first=True,
            loss_reduction="mean",
            max_grad_norm=experiment.max_grad_norm,
            use_ghost_clipping=self.use_ghost_clipping,
        )

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer and the loss as ``PrivacyEngine.make_private`` does."""
        self.optimizer = wrap_optimizer(DPOptimizerFastGradientClipping, optimizer, self.experiment)
        self.criterion: Any = self.criterion_type(
            self.module, self.optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean"
        )

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        From "noise" on these are the calls of the optimizer's ``pre_step``, in its order.
        """
        self.module.enter = enter
        enter("forward")
        logits_BTV = self.module(batch.tokens_BT)
        loss = self.criterion(
            logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), shape=logits_BTV.shape
        )
        enter("backward")
        loss.backward()
        enter("noise")
        self.optimizer.accumulate()
        self.optimizer.add_noise()
        self.optimizer.scale_grad()

    def sample_norms(self) -> Tensor:
        """Tell the norms that the first pass left; (B,)."""
        norms_B: Tensor = self.module.per_sample_gradient_norms
        return norms_B

    def apply_gradient(self) -> None:
        """Let the wrapped optimizer use the gradients."""
        self.optimizer.original_optimizer.step()

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:
        """Watch Opacus's hooks."""
        return watch_hooks(self.module, watch)
