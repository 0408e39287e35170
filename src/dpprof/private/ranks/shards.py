"""Ranks with a shard of each parameter: FSDP2, ``torch.distributed.fsdp.fully_shard``.

FSDP gathers a layer's parameters before its forward and its backward, and a rule gets them whole.
FSDP would reduce the gradients that autograd leaves in gathered parameters; there are none. The
weighted sums of the parameters that it shards together are copied here into one buffer, each as
soon as it is there, and reduce-scattered at once. ``shard_sums`` says when.

Every rank must run the same layers in the same order, as FSDP itself demands. Ranks compare what
they ran before the first sum is reduced. A rank whose batch is empty runs the model on any sample,
and drops its loss: ``losses[:0]``.

On a mesh of two axes, HSDP, ranks of the second axis have shards, and those of the first have
replicas of these. A gradient is then the sum over a replica's ranks until the step.

Shape legend: N ranks with shards, S elements of a group's shards.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.tensor import DTensor, Shard

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.sums import dtype_of_sum, own_part
from dpprof.private.errors import UnsupportedError
from dpprof.private.ranks.ranks import (
    AddNoise,
    Ranks,
    groups_of,
    is_sharded_alone,
    release_among,
)

_reduce_scatter = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)
"""PyTorch 2.13 has the new name, and warns of the old one, which later releases may lack."""


_AXES = {FSDPMeshInfo: 1, HSDPMeshInfo: 2}  # how many axes a mesh has


class _Part(NamedTuple):
    """The place of one parameter's shards in the buffer of its group."""

    parameter: nn.Parameter
    axis: int
    shape: list[int]  # the shape of a shard, with what FSDP fills the last ones up with
    start: int
    end: int


class ReduceScatter:
    """The sums of a group of parameters in one buffer, (N, S), a row for each rank's shards.

    One reduce-scatter of N S elements, in float32 at least, as FSDP's own. All ranks of the process
    group have the parameters in the same order; ``RuntimeError`` if one was converted to 16 bits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Any) -> None:
        for parameter in parameters:
            if dtype_of_sum(parameter) != parameter.dtype:
                raise RuntimeError(
                    f"a parameter under fully_shard became {parameter.dtype} after this clipping "
                    "was made, and its sum would be rounded before noise; convert the model before "
                    "that"
                )
        self._ranks = ranks
        N = distributed.get_world_size(ranks)
        parts = _lay_out(parameters, N)
        self._parts = {part.parameter: part for part in parts}
        self._missing = dict(self._parts)
        self._buffer_NS = make_buffer(parameters[0], N, parts[-1].end)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, summed: Tensor) -> None:
        """Copy a sum to its place, or add it to what is there."""
        is_first = self._missing.pop(parameter, None) is not None
        _write(self._parts[parameter], summed, self._buffer_NS, adds=not is_first)

    @torch.no_grad()
    def finish(self, add: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Add up the sums of all ranks with shards, and hand out this rank's shards."""
        for part in self._missing.values():
            self._buffer_NS[:, part.start : part.end] = 0
        N, S = self._buffer_NS.shape
        shards_S = self._buffer_NS.view(-1)
        if N > 1:
            shards_S = self._buffer_NS.new_empty(S)
            _reduce_scatter(shards_S, self._buffer_NS.view(-1), group=self._ranks)
        for parameter, axis, shape, start, end in self._parts.values():
            padded = shards_S[start:end].view(shape)
            shard = padded.narrow(axis, 0, own_part(parameter).shape[axis])
            add(parameter, _as_shard(parameter, shard))


class Shards(Ranks):
    """The ranks over which ``fully_shard`` shards a model, and those that have replicas of shards.

    Raises:
        UnsupportedError: A trained parameter is not sharded, or otherwise than by ``fully_shard``
            over one mesh of ranks, or a policy is set that is not exact with clipping.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, states: list[Any]) -> None:
        self._states = states
        self._model: Any = model
        self._owners: dict[nn.Parameter, nn.Parameter] = {}
        self._leaves: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._group_of: dict[nn.Parameter, int] = {}
        self._failed_halfway = False
        self.verify()
        trained = {self.own(p): name for name, p in model.named_parameters() if p.requires_grad}
        for parameter, name in trained.items():
            if parameter not in self._owners:
                raise UnsupportedError(
                    f"{name} is trained and not sharded by fully_shard; shard the whole model "
                    "without ignored_params, or freeze it"
                )
        meshes = {_groups_of(group) for group in self._groups()}
        if len(meshes) > 1:
            raise UnsupportedError("fully_shard over several meshes of ranks does not work yet")
        super().__init__(next(iter(meshes)), next(self._groups()).device)

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the sharded parameter of a gathered one."""
        return self._owners.get(parameter, parameter)

    def leaves(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """List the tensors for which autograd may compute a gradient of a parameter."""
        return self._leaves[parameter]

    def verify(self) -> None:
        """Refuse policies with which sums would be wrong, and learn which tensors are gathered.

        ``RuntimeError`` is raised if an earlier backward pass failed halfway.
        """
        if self._failed_halfway:
            raise RuntimeError(
                "an earlier backward pass failed halfway, and fully_shard kept parameters gathered "
                "that no step changes; begin again from a checkpoint"
            )
        for number, group in enumerate(self._groups()):
            _refuse_policies(group)
            for state in group.fsdp_params:
                if state.is_dtensor:
                    raise UnsupportedError(
                        "tensor-parallel parameters do not work with clipping yet"
                    )
                parameter = state.sharded_param
                if type(own_part(parameter)) not in (Tensor, nn.Parameter, FakeTensor):
                    raise UnsupportedError(
                        "fully_shard of a tensor subclass does not work with clipping yet"
                    )
                self._group_of[parameter] = number
                gathered = getattr(state, "_unsharded_param", None)
                self._leaves[parameter] = [parameter, *([] if gathered is None else [gathered])]
                self._owners |= dict.fromkeys(self._leaves[parameter], parameter)

    def refuse_unclipped(self) -> None:
        """Refuse gradients that autograd left in gathered parameters (``RuntimeError``)."""
        for group in self._groups():
            for state in group.fsdp_params:
                gathered = getattr(state, "_unsharded_param", None)
                left = (state.unsharded_accumulated_grad, getattr(gathered, "grad", None))
                if any(gradient is not None for gradient in left):
                    raise RuntimeError(
                        "FSDP holds a gradient that is not clipped; call zero_grad(), and "
                        "backward(losses) of the Clipping alone"
                    )

    def differentiate(self, losses: Tensor, weights: Tensor, *, keeps_graph: bool = False) -> None:
        """Run backward once the outermost parameters are gathered, which another pass freed.

        FSDP itself gathers them only if losses come from what the outermost module returned.
        """
        if is_sharded_alone(self._model):
            self._model.unshard()
        super().differentiate(losses, weights, keeps_graph=keeps_graph)

    def note_failure(self) -> None:
        """Note whether a backward pass failed where parameters are gathered."""
        states = [group._training_state for group in self._groups()]  # noqa: SLF001 (no public name)
        self._failed_halfway |= TrainingState.PRE_BACKWARD in states

    def any(self, *holds: bool) -> list[bool]:
        """Tell of each of several things whether it holds on any rank."""
        answers = torch.tensor(holds, dtype=torch.float32, device=self.device)
        for group in self.groups:
            distributed.all_reduce(answers, distributed.ReduceOp.MAX, group=group)
        if isinstance(answers, FakeTensor):  # of a prediction, whose ranks are alike
            return list(holds)
        return [bool(answer) for answer in answers.tolist()]

    def group_of(self, parameter: nn.Parameter) -> int:
        """Return the number of the parameters that ``fully_shard`` shards together with one."""
        return self._group_of[parameter]

    def release_sums(
        self, sums: dict[nn.Parameter, Tensor], add_noise: AddNoise, *, joins: bool = False
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters with this rank's shards of their averages; the same on all replicas."""
        del joins  # shards stay apart
        if len(self.groups) == 1:
            yield from super().release_sums(sums, add_noise, joins=False)
            return
        for number in dict.fromkeys(map(self.group_of, sums)):
            together = [p for p in sums if self.group_of(p) == number]
            own = [own_part(sums.pop(p)) for p in together]
            released = release_among(self.groups[1], own, add_noise)
            for parameter, part in zip(together, released, strict=True):
                yield parameter, _as_shard(parameter, part)

    @property
    def grouping(self) -> str:
        """Say how many ranks have shards, and what travels together where shards have replicas."""
        sizes = [distributed.get_world_size(group) for group in self.groups]
        together = list(self._group_of.values()) if len(sizes) > 1 else ""
        return f"shards among {sizes} {together}"

    def begin_reduction(self, parameters: Sequence[nn.Parameter]) -> "ReduceScatter":
        """Prepare to reduce the sums of parameters that ``fully_shard`` shards together."""
        return ReduceScatter(parameters, self.groups[0])

    def _groups(self) -> Iterator[Any]:
        for state in self._states:
            yield from groups_of(state)


def _groups_of(group: Any) -> tuple[Any, ...]:
    """Return the process groups of a group of parameters: of shards, and of replicas if any."""
    info = group.mesh_info
    replicas = (info.replicate_process_group,) if type(info) is HSDPMeshInfo else ()
    return (info.shard_process_group, *replicas)


def _lay_out(parameters: Sequence[nn.Parameter], N: int) -> list[_Part]:
    """Find where each parameter's shards lie, one parameter after the other."""
    parts: list[_Part] = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        axis = next(shard.dim for shard in parameter.placements if isinstance(shard, Shard))
        shape = list(parameter.shape)
        shape[axis] = -(-shape[axis] // N)
        start = parts[-1].end if parts else 0
        parts.append(_Part(parameter, axis, shape, start, start + math.prod(shape)))
    return parts


@allocates("communication_buffers")
def make_buffer(like: Tensor, N: int, S: int) -> Tensor:
    """Allocate the buffer of a reduce-scatter of sums, a row for each rank's shards; (N, S)."""
    return torch.empty(N, S, dtype=like.dtype, device=like.device)


def _write(part: _Part, summed: Tensor, buffer_NS: Tensor, *, adds: bool) -> None:
    """Write a sum into the buffer, each rank's shard into its row; or add it to what is there."""
    rows_Ns = buffer_NS[:, part.start : part.end]
    N, s = rows_Ns.shape
    write = Tensor.add_ if adds else Tensor.copy_
    if part.axis:  # which fully_shard allows for equal shards alone
        summed = torch.cat(summed.chunk(N, part.axis))
    flat = summed.reshape(-1)
    whole = len(flat) // s if s else N
    write(rows_Ns[:whole], flat[: whole * s].view(whole, s))
    if whole < N:  # a part of a shard, and shards that are empty
        rest = len(flat) - whole * s
        write(rows_Ns[whole, :rest], flat[whole * s :])
        if not adds:
            rows_Ns[whole, rest:] = 0
            rows_Ns[whole + 1 :] = 0


def _as_shard(parameter: nn.Parameter, own: Tensor) -> DTensor:
    """Return a tensor of which this rank has a shard, sharded as a parameter is."""
    assert isinstance(parameter, DTensor)
    sharded: DTensor = DTensor.from_local(
        *(own, parameter.device_mesh, parameter.placements),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded


def _refuse_policies(group: Any) -> None:
    name = f"fully_shard of {type(group.modules[0]).__name__}"
    refused = {
        "CPUOffloadPolicy": isinstance(group.offload_policy, CPUOffloadPolicy),
        "a mesh that is not of ranks with shards, or of replicas of these (HSDP)": (
            _AXES.get(type(group.mesh_info)) != group.mesh_info.mesh.ndim
        ),
        "a number for reshard_after_forward": group._use_post_forward_mesh,  # noqa: SLF001
        "set_all_reduce_hook": group._all_reduce_hook is not None,  # noqa: SLF001
        "set_reduce_scatter_unused_params": getattr(group, "reduce_scatter_unused_params", False),
    }
    for what, is_set in refused.items():
        if is_set:
            raise UnsupportedError(f"{name} with {what} does not work with clipping yet")
