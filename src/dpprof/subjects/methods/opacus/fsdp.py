"""Opacus's ghost clipping of a model that FSDP2 shards, ``grad_sample_mode="ghost_fsdp"``.

Opacus shards each layer that it has a rule for, and the model with what is left. FSDP reduces
gradients in both backward passes, though those of the first are dropped. Every rank draws noise for
whole parameters and adds its shard's part.
"""

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClippingFSDP
from opacus.optimizers import FSDPOptimizerFastGradientClipping
from opacus.utils import fsdp_utils
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.allocation_marks import allocates
from dpprof.private.errors import UnsupportedError
from dpprof.private.substitutes import substitute
from dpprof.subjects.methods.opacus.refusals import UNTIE
from dpprof.subjects.methods.opacus.two_pass import ReportsPhases
from dpprof.subjects.models.distribute import prepare_sharding

# Unlike Opacus's other modules and optimizers, these keep no tensors as attributes of parameters.
for _function in ("get_norm_sample", "capture_backprops_hook"):
    allocates("norm_samples")(getattr(GradSampleModuleFastGradientClippingFSDP, _function))
allocates("summed_gradients")(FSDPOptimizerFastGradientClipping.accumulate)


class PhasedShards(ReportsPhases, GradSampleModuleFastGradientClippingFSDP):
    """Opacus's module for FSDP that reports phases."""


def shard(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
    """Shard a model as Opacus's ``FSDP2Wrapper`` does.

    Raises:
        UnsupportedError: The model has tied weights, or a trained parameter that has fewer rows
            than there are ranks.
    """
    uses = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(uses)) < len(uses):  # in the first step PyTorch would refuse them in its own words
        raise UnsupportedError(f"Opacus: Parameter tying is not supported with FSDP{UNTIE}")
    refuse_few_rows(model, experiment.world_size)
    shard_part = prepare_sharding(model, experiment, device)
    # FSDP2Wrapper passes no settings on but a policy, the same for layers and model.
    with substitute(fsdp_utils, "fully_shard", lambda part, **_: shard_part(part)):
        sharded: nn.Module = fsdp_utils.FSDP2Wrapper(model)
    return sharded


def add_noise(optimizer: FSDPOptimizerFastGradientClipping) -> None:
    """Make ``.grad`` of the clipped sum, as the optimizer's ``pre_step`` does."""
    with implicit_replication():
        optimizer.add_noise()
    optimizer.scale_grad()


def refuse_few_rows(model: nn.Module, ranks: int) -> None:
    """Refuse parameters of which some rank would have no row.

    The optimizer adds noise that every rank has whole to a sharded gradient. ``DTensor`` makes the
    sum whole where a rank has no row, and no optimizer can apply it to a sharded parameter. A test
    fails once this works.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.shape[0] < ranks:
            raise UnsupportedError(
                "Opacus's optimizer for FSDP fails where a trained parameter has fewer rows than "
                f"there are ranks: {name} has {parameter.shape[0]}, and there are {ranks} ranks"
            )
