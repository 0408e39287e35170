"""Opacus's ghost clipping: norms without per-sample gradients.

Source of the norm trick: Li et al. 2022, "Large Language Models Can Be Strong
Differentially Private Learners", section 4. Cost per linear layer of d x p:
10 B T d p + 2 B T^2 (d + p) FLOPs, and 2 B T^2 p more for a bias. Memory: two T x T matrices per
sample while a layer's norms are computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.opacus.two_pass import OpacusTwoPass


class OpacusGhost(OpacusTwoPass):
    """``grad_sample_mode="ghost"``; only linear layers and embeddings need no gradients.

    Under FSDP it is ``grad_sample_mode="ghost_fsdp"``, which Opacus has since 1.6.
    """

    use_ghost_clipping = True
    parallel_kinds = ("ddp", "fsdp")

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        self._fsdp = _sharding(experiment)
        if self._fsdp and experiment.accumulation > 1:
            raise UnsupportedError(
                "opacus-ghost does not run with accumulation under fsdp, which reduces in both of "
                "its backward passes; closest: parallel ddp, or method flash-bk"
            )
        if self._fsdp:
            self.grad_sample_mode = "ghost_fsdp"
        super().__init__(model, experiment)

    @staticmethod
    def wrap_for_ranks(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
        """Wrap a model in Opacus's replacement of DDP, or shard it as Opacus does."""
        fsdp = _sharding(experiment)
        wrap = fsdp.shard if fsdp else OpacusTwoPass.wrap_for_ranks
        wrapped: nn.Module = wrap(model, experiment, device)
        return wrapped

    def module_type(self) -> Callable[..., AbstractGradSampleModule]:
        """Return the wrapper of the model, of Opacus's that compute norms."""
        return self._fsdp.PhasedShards if self._fsdp else super().module_type()

    def add_noise(self) -> None:
        """Make ``.grad`` of the clipped sum, by the calls of the optimizer's ``step``."""
        if self._fsdp:
            self._fsdp.add_noise(self.optimizer)
        else:
            super().add_noise()


def _sharding(experiment: Experiment) -> Any:
    """Return the module on Opacus's FSDP, which older releases do not have; None without FSDP."""
    if experiment.parallel is None or experiment.parallel.kind != "fsdp":
        return None
    from dpprof.subjects.methods.opacus import fsdp  # noqa: PLC0415

    return fsdp
