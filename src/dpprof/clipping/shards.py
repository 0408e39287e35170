"""Ranks with a shard of each parameter: FSDP2, ``torch.distributed.fsdp.fully_shard``.

FSDP gathers a layer's parameters before its forward and its backward, and a rule gets them whole.
FSDP would reduce the gradients that autograd leaves in gathered parameters; there are none. The
weighted sum of a parameter is reduce-scattered here as soon as all uses of the parameter are in it,
and freed. ``ShardSums`` says when.

Every rank must run the same layers in the same order, as FSDP itself demands. Ranks compare what
they ran before the first sum is reduced. A rank whose batch is empty runs the model on any sample,
and drops its loss: ``losses[:0]``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from dpprof.clipping.ranks import AddNoise, Ranks
from dpprof.clipping.sums import add_to_grad, dtype_of_sum, own_part
from dpprof.spec.registry import UnsupportedError

_reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
"""The name is new in PyTorch 2.13, which warns of the old one."""


class Shards(Ranks):
    """The ranks over which ``fully_shard`` shards a model.

    Raises:
        UnsupportedError: A trained parameter is not sharded, or otherwise than by ``fully_shard``
            over one group of ranks, or a policy is set that is not exact with clipping.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, states: list[Any]) -> None:
        self._states = states
        self._owners: dict[Tensor, nn.Parameter] = {}
        self.verify()
        trained = {self.own(p): name for name, p in model.named_parameters() if p.requires_grad}
        for parameter, name in trained.items():
            if parameter not in self._owners:
                raise UnsupportedError(
                    f"{name} is trained and not sharded by fully_shard; shard the whole model "
                    "without ignored_params, or freeze it"
                )
        meshes = {id(one.mesh_info.shard_process_group) for one in self._groups()}
        if len(meshes) > 1:
            raise UnsupportedError("fully_shard over several groups of ranks does not work yet")
        first = next(self._groups())
        assert first.mesh_info.shard_process_group is not None
        super().__init__(first.mesh_info.shard_process_group, first.device)

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the sharded parameter of a gathered one."""
        return self._owners.get(parameter, parameter)

    def leaves(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """List the tensors for which autograd may compute a gradient of a parameter."""
        return [leaf for leaf, owner in self._owners.items() if owner is parameter]  # type: ignore[misc]

    def verify(self) -> None:
        """Refuse policies with which sums would be wrong, and learn which tensors are gathered.

        Raises:
            UnsupportedError: Such a policy is set.
        """
        for group in self._groups():
            _refuse_policies(group)
            for one in group.fsdp_params:
                if one.is_dtensor:
                    raise UnsupportedError(
                        "tensor-parallel parameters do not work with clipping yet"
                    )
                if type(own_part(one.sharded_param)) not in (Tensor, nn.Parameter, FakeTensor):
                    raise UnsupportedError(
                        "fully_shard of a tensor subclass does not work with clipping yet"
                    )
                self._owners[one.sharded_param] = one.sharded_param
                gathered = getattr(one, "_unsharded_param", None)
                if gathered is not None:
                    self._owners[gathered] = one.sharded_param

    def refuse_unclipped(self) -> None:
        """Refuse gradients that autograd left in gathered parameters.

        Raises:
            RuntimeError: There is one.
        """
        for group in self._groups():
            for one in group.fsdp_params:
                gathered = getattr(one, "_unsharded_param", None)
                left = (one.unsharded_accumulated_grad, getattr(gathered, "grad", None))
                if any(gradient is not None for gradient in left):
                    raise RuntimeError(
                        "FSDP holds a gradient that is not clipped; call zero_grad(), and "
                        "backward(losses) of the Clipping alone"
                    )

    def any(self, holds: bool) -> bool:
        """Tell whether something holds on any rank."""
        answer = torch.tensor([float(holds)], device=self.device)
        distributed.all_reduce(answer, distributed.ReduceOp.MAX, group=self.group)
        return bool(answer)

    def release_sum(self, summed: Tensor, add_noise: AddNoise) -> Tensor:
        """Add noise to this rank's shard of the sum over all ranks."""
        add_noise(own_part(summed))
        return summed

    @torch.no_grad()
    def add_to_shard(self, parameter: nn.Parameter, total: Tensor | None, bound: float) -> None:
        """Reduce a sum over all ranks' samples, and add this rank's shard of it to ``.grad``."""
        assert isinstance(parameter, DTensor)
        if dtype_of_sum(parameter) != parameter.dtype:
            raise RuntimeError(
                f"a parameter under fully_shard became {parameter.dtype} after this clipping was "
                "made, and its sum would be rounded before noise; convert the model before that"
            )
        shard = self._reduce(parameter, total).to(parameter.dtype)
        summed = DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        add_to_grad(parameter, summed, bound)

    def _reduce(self, parameter: DTensor, total: Tensor | None) -> Tensor:
        """Reduce-scatter a sum, (whole shape), in float32 at least; None is zeros."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if total is None:
            total = torch.zeros(parameter.shape, dtype=dtype, device=self.device)
        total = total.view(parameter.shape).to(dtype)
        (placement,) = parameter.placements
        assert isinstance(placement, Shard)
        own = parameter.to_local()
        axis = placement.dim
        length = -(-total.shape[axis] // self.size)
        if axis == 0:
            missing = length * self.size - len(total)
            if missing:
                total = torch.cat([total, total.new_zeros(missing, *total.shape[1:])])
        else:  # which fully_shard allows for equal shards alone
            total = torch.cat(total.chunk(self.size, axis))
        shape = list(parameter.shape)
        shape[axis] = length
        shard = total.new_empty(shape)
        _reduce_scatter(shard, total.contiguous(), group=self.group)
        return shard.narrow(axis, 0, own.shape[axis])

    def _groups(self) -> Iterator[Any]:
        for state in self._states:
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # one group at most, before PyTorch 2.12
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []  # noqa: SLF001
            yield from groups


def _refuse_policies(group: Any) -> None:
    name = f"fully_shard of {type(group.modules[0]).__name__}"
    refused = {
        "CPUOffloadPolicy": isinstance(group.offload_policy, CPUOffloadPolicy),
        "a mesh of two axes, or replicas (HSDP)": type(group.mesh_info) is not FSDPMeshInfo
        or group.mesh_info.mesh.ndim != 1,
        "a number for reshard_after_forward": group._use_post_forward_mesh,  # noqa: SLF001
        "set_all_reduce_hook": group._all_reduce_hook is not None,  # noqa: SLF001
        "set_reduce_scatter_unused_params": getattr(group, "reduce_scatter_unused_params", False),
    }
    for what, is_set in refused.items():
        if is_set:
            raise UnsupportedError(f"{name} with {what} does not work with clipping yet")
