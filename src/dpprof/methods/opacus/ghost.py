"""Opacus's ghost clipping: norms without per-sample gradients.

Source of the norm trick: Li et al. 2022, "Large Language Models Can Be Strong
Differentially Private Learners", section 4. Cost per linear layer of d x p:
10 B T d p + 2 B T^2 (d + p) FLOPs, and 2 B T^2 p more for a bias. Memory: two T x T matrices per
sample while a layer's norms are computed.
"""

from collections.abc import Callable

import torch
from torch import nn

from dpprof.methods.opacus.two_pass import OpacusTwoPass
from dpprof.spec.experiment import Experiment


class OpacusGhost(OpacusTwoPass):
    """``grad_sample_mode="ghost"``; only linear layers and embeddings need no gradients.

    Under FSDP it is ``grad_sample_mode="ghost_fsdp"``, which Opacus has since 1.6.
    """

    use_ghost_clipping = True
    parallel_kinds = ("ddp", "fsdp")

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        self._is_sharded = _shards(experiment)
        if self._is_sharded:
            self.grad_sample_mode = "ghost_fsdp"
        super().__init__(model, experiment)

    @staticmethod
    def wrap_for_ranks(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
        """Wrap a model in Opacus's replacement of DDP, or shard it as Opacus does."""
        if _shards(experiment):
            from dpprof.methods.opacus.fsdp import shard  # noqa: PLC0415 (older Opacus has none)

            return shard(model, experiment, device)
        return OpacusTwoPass.wrap_for_ranks(model, experiment, device)

    def module_type(self) -> Callable[..., nn.Module]:
        """Return the wrapper of the model, of Opacus's that compute norms."""
        if self._is_sharded:
            from dpprof.methods.opacus.fsdp import PhasedShards  # noqa: PLC0415

            return PhasedShards
        return super().module_type()

    def add_noise(self) -> None:
        """Make ``.grad`` of the clipped sum, by the calls of the optimizer's ``step``."""
        if self._is_sharded:
            from dpprof.methods.opacus.fsdp import add_noise  # noqa: PLC0415

            add_noise(self.optimizer)
        else:
            super().add_noise()


def _shards(experiment: Experiment) -> bool:
    return experiment.parallel is not None and experiment.parallel.kind == "fsdp"
