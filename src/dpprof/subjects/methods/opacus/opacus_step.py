"""The base of Opacus's methods: their optimizer, and where it keeps tensors."""

import warnings
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule, create_or_accumulate_grad_sample
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import Optimizer

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.terms import Component
from dpprof.private.allocation_marks import Function
from dpprof.private.errors import UnsupportedError
from dpprof.private.norms.code_paths import Watch
from dpprof.subjects.methods.opacus.refusals import tell_refusals
from dpprof.subjects.methods.opacus.samplers import leave_padding_out, watch_hooks
from dpprof.subjects.methods.training_step import TrainingStep

# PyTorch warns of Opacus's hooks where the inputs of a model, as images, require no gradient.
warnings.filterwarnings("ignore", "Full backward hook is firing")


class OpacusStep(TrainingStep):
    """A step with one of Opacus's optimizers, on a model that Opacus wraps.

    Formal guarantees: as of Opacus's flat clipping, L2 sensitivity ``max_grad_norm`` under adding
    or removing one sample.

    Raises:
        UnsupportedError: Opacus refuses the model, here or in its first step. ``non-reentrant``
            checkpointing: hooks count a layer's forward pass twice when it is recomputed, and then
            assign gradients wrongly.
    """

    grad_sample_mode: str
    """Opacus's name of the way to per-sample gradients or norms, by which it picks an optimizer."""

    clipping: ClassVar[str] = "flat"  # opacus's name of the mechanism
    parallel_kinds: ClassVar[Collection[str]] = ("ddp",)
    unsupported_ranks: ClassVar[Mapping[str, str]] = {
        "fsdp": "Opacus trains under FSDP with ghost clipping alone, the method opacus-ghost"
    }
    module: Any
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
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase) and any(p.requires_grad for p in layer.parameters()):
                raise UnsupportedError(
                    f"Opacus has no per-sample gradients of torch.nn.{type(layer).__name__}; build "
                    f"its DP{type(layer).__name__} (attention opacus builds it in models with "
                    "names), or use flash-bk or flash"
                )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_complex():
                raise UnsupportedError(
                    f"{name} is complex, and Opacus's noise for complex parameters is too small: "
                    "both parts share the variance of one; use flash-bk or flash"
                )
        super().__init__(model, experiment)
        with tell_refusals():
            self.module = self.wrap(model)
        leave_padding_out(self.module)

    @abstractmethod
    def wrap(self, model: nn.Module) -> AbstractGradSampleModule:
        """Wrap the model so that its backward pass leaves per-sample gradients or norms."""

    @staticmethod
    def wrap_for_ranks(
        model: nn.Module,
        experiment: Experiment,  # noqa: ARG004 (of other methods)
        device: torch.device,  # noqa: ARG004
    ) -> nn.Module:
        """Wrap a model; by default in Opacus's replacement of DDP, which leaves gradients alone."""
        replica: nn.Module = DifferentiallyPrivateDistributedDataParallel(model)
        return replica

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer in Opacus's."""
        self.wrap_optimizer(optimizer)

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
            "expected_batch_size": self.experiment.accumulation * self.experiment.batch_size,
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

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:
        """Watch Opacus's hooks."""
        return watch_hooks(self.module, watch)
