"""Lets the ranks of a process group train a model together, as its experiment says."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.allocation_marks import allocates
from dpprof.private.number_formats import SHORT
from dpprof.private.substitutes import substitute

# DDP's reducer allocates its buckets in these two.
for _function in ("_ddp_init_helper", "_pre_forward"):
    allocates("communication_buffers")(getattr(DistributedDataParallel, _function))


def distribute(model: nn.Module, experiment: Experiment, device: torch.device) -> nn.Module:
    """Return the model for this rank of the default process group.

    fsdp shards each block, then what is left. In 16 bits it gathers parameters in 16 bits and
    reduces in float32, in place of autocast; logits are float32.

    The model is on its device already, in float32 or float64.
    """
    assert experiment.parallel is not None
    if experiment.parallel.kind == "ddp":
        return _replicate(model)
    shard = prepare_sharding(model, experiment, device)
    for block in find_blocks(model):
        shard(block)
    return shard(model)


def prepare_sharding(
    model: nn.Module, experiment: Experiment, device: torch.device
) -> Callable[[nn.Module], nn.Module]:
    """Return ``fully_shard`` with an experiment's settings, for parts of a model and then all."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 (slow to import)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    assert experiment.parallel is not None
    reshards = experiment.parallel.reshard_after_forward
    with _disable_current_modes():  # it reads elements of a tensor, which a fake one does not have
        sizes: tuple[int, ...] = (distributed.get_world_size(),)
        if experiment.parallel.kind == "hsdp":
            sizes = (experiment.parallel.replicas, experiment.parallel.shards)
        names = ("replicas", "shards")[-len(sizes) :]
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    # Opacus copies layers with deepcopy, and a fake parameter's mesh cannot be copied.
    mesh.__deepcopy__ = lambda _: mesh  # type: ignore[attr-defined]
    of_parts = of_all = MixedPrecisionPolicy()
    if experiment.dtype in SHORT:
        dtype = getattr(torch, experiment.dtype)
        policy: dict[str, Any] = {"param_dtype": dtype, "reduce_dtype": torch.float32}
        of_parts = MixedPrecisionPolicy(**policy)
        of_all = MixedPrecisionPolicy(**policy, output_dtype=torch.float32)

    def shard(module: nn.Module) -> nn.Module:
        policy = of_all if module is model else of_parts
        settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshards}
        fully_shard(module, mesh=mesh, **settings)
        return module

    return shard


def _replicate(model: nn.Module) -> nn.Module:
    if distributed.get_backend() != distributed.Backend.FAKE:
        return DistributedDataParallel(model)
    # There is nobody to compare the model with, and DDP's own reduction needs the group's answer.
    with substitute(distributed, _ASSIGN, _assign_to_buckets):
        replica = DistributedDataParallel(model, init_sync=False)
    replica.register_comm_hook(None, _reduce_in_place)
    return replica


def exchange_gradients(model: Any, is_wanted: bool) -> None:
    """Say whether the next backward pass exchanges gradients, as ``no_sync`` does."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_wanted
    else:
        model.set_requires_gradient_sync(is_wanted)


_ASSIGN = "_compute_bucket_assignment_by_size"
_assign = getattr(distributed, _ASSIGN)
_BUCKETS = [2**20, 25 * 2**20]
"""Least bytes of DDP's first bucket and of the others, by default."""


def _assign_to_buckets(parameters: Sequence[Tensor], *_: Any) -> tuple[list[list[int]], list[int]]:
    """Assign parameters to the buckets that DDP has after its first step.

    DDP begins with one bucket. It makes others in the order in which gradients arrive, which is
    taken to be the reverse of the order in which parameters were registered.
    """
    indices, limits = _assign([*reversed(parameters)], _BUCKETS, [])
    last = len(parameters) - 1
    return [[last - index for index in bucket] for bucket in reversed(indices)], [*reversed(limits)]


def _reduce_in_place(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, as DDP does; it is the buffer of the result."""
    buffer = bucket.buffer()
    distributed.all_reduce(buffer.div_(distributed.get_world_size()))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """List a model's blocks: the modules of its outermost lists and sequences."""
    blocks: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, nn.ModuleList | nn.Sequential):
            blocks += module
        else:
            waiting += module.children()
    return blocks
