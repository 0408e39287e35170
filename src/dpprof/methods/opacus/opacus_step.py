"""The base of Opacus's methods: their optimizer, and where it keeps tensors."""

from collections.abc import Mapping
from typing import Any, ClassVar

from opacus.grad_sample import create_or_accumulate_grad_sample
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import Optimizer

from dpprof.methods.training_step import TrainingStep
from dpprof.records.births import Function
from dpprof.records.terms import Component
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError


class OpacusStep(TrainingStep):
    """A step with one of Opacus's optimizers.

    Raises:
        UnsupportedError: ``non-reentrant`` checkpointing: hooks count a layer's forward pass twice
            when it is recomputed, and then assign gradients wrongly.
    """

    optimizer: DPOptimizer
    attributes: ClassVar[Mapping[str, Component]] = {
        "grad_sample": "per_sample_gradients",
        "_current_grad_sample": "per_sample_gradients",
        "_norm_sample": "norm_samples",
        "summed_grad": "summed_gradients",
    }
    births: ClassVar[Mapping[Function, Component]] = {
        create_or_accumulate_grad_sample: "per_sample_gradients",
        _generate_noise: "noise",
    }

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if experiment.checkpointing == "non-reentrant":
            raise UnsupportedError(
                "Opacus's hooks do not work under non-reentrant checkpointing; use reentrant"
            )
        super().__init__(model, experiment)

    def wrap_optimizer(
        self, wrapper: type[DPOptimizer], optimizer: Optimizer, **others: Any
    ) -> None:
        """Wrap an optimizer as ``PrivacyEngine.make_private`` does for a fixed batch size.

        ``others`` are settings that differ from the experiment's.
        """
        settings: dict[str, Any] = {
            "noise_multiplier": self.experiment.noise_multiplier,
            "max_grad_norm": self.experiment.max_grad_norm,
            "expected_batch_size": self.experiment.batch_size,
            "loss_reduction": "mean",
        }
        self.optimizer = wrapper(optimizer, **settings | others)

    def apply_gradient(self) -> None:
        """Step the wrapped optimizer."""
        self.optimizer.original_optimizer.step()
