"""Roles of the tensors that ranks exchange, and shapes of sharded tensors, for a recorder.

FSDP copies shards into the buffer of an all-gather, and its output into the gathered parameters. It
copies gradients into the buffer of a reduce-scatter, whose output is the shards' gradients, and so
does clipping with its sums.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.experiments.records.terms import Component
from dpprof.private.ranks.ranks import groups_of, states_of
from dpprof.private.substitutes import substitute

Roles = Mapping[int | str, Component]
"""Components by the position or name of an argument."""


def find_roles() -> dict[Any, Roles]:
    """Find the operators that this process has, with the roles of their arguments.

    FSDP's operators exist once it is imported.
    """
    c10d, fsdp = torch.ops.c10d, torch.ops.fsdp
    roles: dict[Any, Roles] = {
        c10d._allgather_base_: {0: "communication_buffers", 1: "communication_buffers"},
        c10d._reduce_scatter_base_: {1: "communication_buffers"},
        c10d.allreduce_: {0: "communication_buffers"},
    }
    if hasattr(fsdp, "chunk_cat"):
        roles |= {
            fsdp.all_gather_copy_in: {0: "communication_buffers", 1: "communication_buffers"},
            fsdp.split_with_sizes_copy: {"out": "unsharded_parameters"},
            fsdp.chunk_cat: {0: "unsharded_gradients", "out": "communication_buffers"},
        }
    return roles


def find_gathered(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield what FSDP has gathered parameters into, with the module of each parameter."""
    for state in states_of(model):
        for group in groups_of(state):
            for parameter in group.fsdp_params:
                for tensor in parameter.all_gather_outputs:
                    yield parameter._module_info.module, tensor  # noqa: SLF001 (no public name)


def takes_dtensors(types: Iterable[type]) -> bool:
    """Return whether an operator is called on a ``DTensor``, from a dispatcher's ``types``."""
    return any(kind.__name__ == "DTensor" for kind in types)


@contextmanager
def around_propagation(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a context around each search for the whole shape of a ``DTensor``, within this.

    PyTorch finds the shape by running the operator on fake tensors of the whole size, which no
    device ever holds.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(module.ShardingPropagator, name)

    def propagate_within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return propagate(*args, **kwargs)

    with substitute(module.ShardingPropagator, name, propagate_within):
        yield
