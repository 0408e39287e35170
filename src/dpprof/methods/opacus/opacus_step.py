"""The base of Opacus's methods: their optimizer, and where it keeps tensors."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import create_or_accumulate_grad_sample
from opacus.optimizers import DPOptimizer, get_optimizer_class
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

    grad_sample_mode: str
    """Opacus's name of the way to per-sample gradients or norms, by which it picks an optimizer."""

    clipping: ClassVar[str] = "flat"
    """Opacus's name of the mechanism."""

    parallel_kinds: ClassVar[Collection[str]] = ("ddp",)
    unsupported_ranks: ClassVar[Mapping[str, str]] = {
        "fsdp": "Opacus trains under FSDP with ghost clipping alone, the method opacus-ghost"
    }
    """Why a kind of ``parallel`` is not in ``parallel_kinds``."""

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

    @classmethod
    def distribute(
        cls, model: nn.Module, experiment: Experiment, device: torch.device
    ) -> nn.Module:
        """Return a model for this rank, wrapped as Opacus wants it.

        Raises:
            UnsupportedError: Opacus does not train so on several ranks.
        """
        parallel = experiment.parallel
        if parallel is None:
            return model
        if parallel.kind not in cls.parallel_kinds:
            raise UnsupportedError(cls.unsupported_ranks[parallel.kind])
        return cls.wrap_for_ranks(model, experiment, device)

    @staticmethod
    def wrap_for_ranks(
        model: nn.Module,
        experiment: Experiment,  # noqa: ARG004 (of other methods)
        device: torch.device,  # noqa: ARG004
    ) -> nn.Module:
        """Wrap a model; by default in Opacus's replacement of DDP, which leaves gradients alone."""
        replica: nn.Module = DifferentiallyPrivateDistributedDataParallel(model)
        return replica

    def wrap_optimizer(self, optimizer: Optimizer, **others: Any) -> None:
        """Wrap an optimizer as ``PrivacyEngine.make_private`` does for a fixed batch size.

        Several ranks each give the batch size of one; Opacus divides by their number itself.
        ``others`` are settings that differ from the experiment's.
        """
        wrapper = get_optimizer_class(
            clipping=self.clipping,
            distributed=self.experiment.parallel is not None,
            grad_sample_mode=self.grad_sample_mode,
        )
        settings: dict[str, Any] = {
            "noise_multiplier": self.experiment.noise_multiplier,
            "max_grad_norm": self.experiment.max_grad_norm,
            "expected_batch_size": self.experiment.batch_size,
            "loss_reduction": "mean",
        }
        self.optimizer = wrapper(optimizer, **settings | others)

    def add_noise(self) -> None:
        """Make ``.grad`` of the clipped sum, by the calls of the optimizer's ``step``."""
        self.optimizer.add_noise()
        self.optimizer.scale_grad()
        if self.experiment.parallel is not None:
            self.optimizer.reduce_gradients()

    def apply_gradient(self) -> None:
        """Step the wrapped optimizer."""
        self.optimizer.original_optimizer.step()
