"""Opacus's ghost clipping: norms without per-sample gradients.

Source of the norm trick: Li et al. 2022, "Large Language Models Can Be Strong
Differentially Private Learners", section 4. Cost per linear layer of d x p:
10 B T d p + 2 B T^2 (d + p) FLOPs, and 2 B T^2 p more for a bias. Memory: two T x T matrices per
sample while a layer's norms are computed.
"""

import torch
from torch import nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.opacus import fsdp
from dpprof.subjects.methods.opacus.two_pass import OpacusTwoPass


class OpacusGhost(OpacusTwoPass):
    """``grad_sample_mode="ghost"``; only linear layers and embeddings need no gradients.

    Under FSDP it is ``grad_sample_mode="ghost_fsdp"``.
    """

    use_ghost_clipping = True
    parallel_kinds = ("ddp", "fsdp")

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if experiment.shards > 1:
            if experiment.accumulation > 1:
                raise UnsupportedError(
                    "opacus-ghost does not run with accumulation under fsdp, which reduces in both "
                    "of its backward passes; closest: parallel ddp, or method flash-bk"
                )
            self.grad_sample_mode, self.module_type = "ghost_fsdp", fsdp.PhasedShards
        super().__init__(model, experiment)

    @staticmethod
    def wrap_for_ranks(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
        """Wrap a model in Opacus's replacement of DDP, or shard it as Opacus does."""
        wrap = fsdp.shard if experiment.shards > 1 else OpacusTwoPass.wrap_for_ranks
        return wrap(model, experiment, device)

    def add_noise(self) -> None:
        """Make ``.grad`` of the clipped sum, by the calls of the optimizer's ``step``."""
        if self.experiment.shards > 1:
            fsdp.add_noise(self.optimizer)
        else:
            super().add_noise()
