"""Finds how a model is distributed: not at all, by DDP, or by FSDP2."""

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpprof.clipping.ranks import Ranks, is_distributed
from dpprof.clipping.replicas import Replicas
from dpprof.spec.registry import UnsupportedError


def find_ranks(model: nn.Module) -> Ranks:
    """Find the ranks that train a model.

    Raises:
        UnsupportedError: It is distributed in a way that is not exact with clipping.
    """
    _refuse_replicate(model)
    states = _find_states(model)
    if isinstance(model, DistributedDataParallel):
        if states or any(is_distributed(parameter) for parameter in model.parameters()):
            raise UnsupportedError("DistributedDataParallel of sharded parameters does not work")
        return Replicas(model)
    if not states:
        return Ranks()
    # It takes as long to import as PyTorch itself.
    from dpprof.clipping.shards import Shards  # noqa: PLC0415

    return Shards(model, states)


def _find_states(model: nn.Module) -> list[Any]:
    """List the states of FSDP2 in a model."""
    found = (getattr(module, "_get_fsdp_state", None) for module in model.modules())
    return list(dict.fromkeys(get_state() for get_state in found if get_state is not None))


def _refuse_replicate(model: nn.Module) -> None:
    """Refuse the composable form of DDP, which has no wrapper that could be seen."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None:
        return
    for module in model.modules():
        state = composable.replicate.state(module)
        if isinstance(state, composable._ReplicateState):  # noqa: SLF001
            raise UnsupportedError(
                "replicate() does not work with clipping; use DistributedDataParallel"
            )
