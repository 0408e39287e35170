"""Finds the ranks that train a model, and adds up their sums, with noise added once.

Each rank computes the whole gradient of its own samples, so no other rank needs their norms and
clipping factors. No gradient of a parameter passes through autograd, so neither DDP's buckets nor
FSDP's reduce-scatter carry one: the sums of clipped gradients are added here, undivided and in
float32 at least. The collectives of a step, beside those with which FSDP gathers parameters, in
their order:

* DDP (``Replicas``), in the optimizer's step: one all-gather of settings (``agree``), and one of
  digests of the sums, to which the noise is bound (``share``); one all-reduce for each bucket of
  DDP's size, last parameters first. Before it, every rank adds the noise of its own part of the
  bucket's elements.
* FSDP (``Shards``), in backward once norms are known: one all-gather of what was used; one
  reduce-scatter for each group of parameters that ``fully_shard`` shards together, as soon as all
  sums of the group are there, in the order in which backward passed each group's last use
  (``shard_sums``). In the step, one all-gather of settings, and each rank adds noise to its
  shards. Before backward, an all-reduce tells whether a batch is verified: on the first ones, and
  on all of a model in which values enter for all samples at once (``first_batch``).
* HSDP (``Shards`` with replicas), as FSDP among the ranks of a replica; settings are gathered
  among replicas too. In the step, one all-gather of digests among replicas, and one all-reduce for
  each group, in the order of the optimizer's parameters, with noise as under DDP.

The guarantee rests on this: every rank clips to one bound, each element gets noise from one rank,
and ranks' random numbers are independent, because they follow from the rank too (``noise_keys``).
Before anything is applied, ranks compare what they are set to (``agree``).
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.sums import group_small, own_part
from dpprof.private.errors import UnsupportedError

AddNoise = Callable[..., None]  # adds noise to its first argument, and averages all
Settings = Mapping[str, float | str]  # what is the same on all ranks, by name


class Reduction(Protocol):
    """The sums over this rank's samples of parameters that are sharded together."""

    def add(self, parameter: nn.Parameter, summed: Tensor) -> None:
        """Take over a sum; several of a parameter are added up."""

    def finish(self, add: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Reduce all onto the shards of all ranks; a parameter without a sum has zeros."""


class Ranks:
    """The ranks that train one model, of one process group, or of shards' and replicas'."""

    wrapper: nn.Module | None = None  # the ``DistributedDataParallel`` that may run the model
    is_sharded = False  # whether sums are reduced onto shards in backward

    def __init__(self, groups: Sequence[Any] = (), device: torch.device | None = None) -> None:
        self.groups, self.device = groups, device or torch.device("cpu")
        self.rank, self.size = 0, 1
        for group in groups:
            self.rank += self.size * distributed.get_rank(group)
            self.size *= distributed.get_world_size(group)

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that an optimizer trains, of one that a layer has at present."""
        if is_distributed(parameter):
            raise UnsupportedError(
                "a sharded parameter (DTensor) that is not fully_shard's does not work with "
                "clipping yet"
            )
        return parameter

    def leaves(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """List the tensors for which autograd may compute a gradient of a parameter."""
        return [parameter]

    def verify(self) -> None:
        """Refuse later changes of how the model is distributed."""

    def refuse_unclipped(self) -> None:
        """Refuse gradients that autograd left where a layer's parameters are gathered."""

    def differentiate(self, losses: Tensor, weights: Tensor, *, keeps_graph: bool = False) -> None:
        """Run backward, maybe not for the last time."""
        torch.autograd.backward(losses, weights, retain_graph=keeps_graph)

    def note_failure(self) -> None:
        """Note that a backward pass failed."""

    def take_over(self) -> None:
        """Change what must be changed while a clipping is attached."""

    def release(self) -> None:
        """Restore what was changed."""

    @property
    def grouping(self) -> str:
        """Say which sums a step reduces together, by which elements get noise from which rank."""
        return ""

    def agree(self, settings: Settings) -> None:
        """Verify that all ranks have the same settings; or else each raises a ``RuntimeError``."""
        if not self.groups:
            return
        # Six bytes of a digest are exact in float64.
        numbers = [
            float(int.from_bytes(hashlib.sha256(setting.encode()).digest()[:6], "big"))
            if isinstance(setting, str)
            else float(setting)
            for setting in settings.values()
        ]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        gathered = mine[None]
        for group in self.groups:
            gathered = gather(gathered, group)
        if isinstance(mine, FakeTensor):  # of a prediction, which has one rank and no elements
            return
        columns = zip(*gathered.tolist(), strict=True)
        for (name, setting), values in zip(settings.items(), columns, strict=True):
            other = next((r for r, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                both = "" if isinstance(setting, str) else f": {values[0]:g} and {values[other]:g}"
                raise RuntimeError(f"{name} differs between rank 0 and rank {other}{both}")

    @property
    def adds_up_in_step(self) -> bool:
        """Whether sums of several ranks are added up in the step, once they have noise."""
        return len(self.groups) > int(self.is_sharded)

    def share(self, digest: Tensor) -> Tensor:
        """Gather the digests of the ranks whose sums are added up in the step."""
        return gather(digest.to(self.device), self.groups[-1])

    def any(self, *holds: bool) -> list[bool]:
        """Tell whether things hold on this rank; under ``fully_shard`` on any, and all ask."""
        return list(holds)

    group_of: Callable[[nn.Parameter], int]  # a number for what is sharded together
    begin_reduction: Callable[[Sequence[nn.Parameter]], Reduction]
    """Prepares to reduce the sums of parameters that are sharded together (``Shards``)."""

    def release_sums(
        self, sums: dict[nn.Parameter, Tensor], add_noise: AddNoise, *, joins: bool = True
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters, with the noised average over ranks of this one's sums, emptied."""
        parameters = list(sums)
        own = [own_part(summed) for summed in sums.values()]
        groups = group_small(own) if joins else [[place] for place in range(len(own))]
        del own
        for group in groups:
            together = [sums.pop(parameters[place]) for place in group]
            if len(together) == 1:
                add_noise(own_part(together[0]))
            else:
                _add_noise_together(together, add_noise)
            yield from zip([parameters[place] for place in group], together, strict=True)


def release_among(group: Any, sums: list[Tensor], add_noise: AddNoise) -> list[Tensor]:
    """Return the noised averages over a group's ranks of this rank's sums, in one all-reduce.

    Each rank adds noise to its own part of the elements, so no rank sees a total without it, and
    all get the same bits. The sums are of one dtype, and their list is emptied.
    """
    shapes = [summed.shape for summed in sums]
    dtype = torch.promote_types(sums[0].dtype, torch.float32)
    several = len(sums) > 1
    flat = torch.cat([summed.flatten() for summed in sums]) if several else sums[0].reshape(-1)
    flat = flat.to(dtype)
    sums.clear()
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    start, end = len(flat) * rank // size, len(flat) * (rank + 1) // size
    add_noise(flat[start:end], flat[:start], flat[end:])
    distributed.all_reduce(flat, group=group)
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@allocates("noise")
def _add_noise_together(sums: list[Tensor], add_noise: AddNoise) -> None:
    """Add noise to small sums, in place, and average them, side by side in one tensor."""
    flat = torch.cat([summed.reshape(-1) for summed in sums])
    add_noise(flat)
    parts = torch.split(flat, [summed.numel() for summed in sums])
    averages = [part.view(summed.shape) for part, summed in zip(parts, sums, strict=True)]
    torch._foreach_copy_(sums, averages)


def gather(rows: Tensor, group: Any) -> Tensor:
    """Return the rows of all ranks of a group, in their order."""
    parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, rows, group=group)
    return torch.cat(parts)


def is_distributed(parameter: Tensor) -> bool:
    """Tell whether a tensor is a ``DTensor``, without importing that."""
    return hasattr(parameter, "placements")


def is_sharded_alone(module: nn.Module) -> bool:
    """Tell whether ``fully_shard`` was called on a module, without importing that."""
    return hasattr(module, "_get_fsdp_state")


def refuse_other_wrapper(ranks: Ranks) -> None:
    """Refuse to run a layer inside of a wrapper that the clipping does not know."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and active is not ranks.wrapper:
        raise UnsupportedError(
            "DistributedDataParallel runs this model, and its Clipping does not know; make the "
            "Clipping of the DistributedDataParallel itself"
        )


_SYNCHRONISES = ("require_backward_grad_sync", "require_forward_param_sync")


class Replicas(Ranks):
    """The ranks of a ``DistributedDataParallel``, each with a replica of the model.

    The wrapper makes replicas equal at the start, as ever. Its reduction of gradients is switched
    off, as ``no_sync`` does: each rank keeps the sum over its own samples, batch after batch, until
    the step. There each rank adds noise to its own part of the elements, and one all-reduce for
    each bucket adds sums and noise. So the noise of the total has standard deviation sigma C
    exactly, no rank sees the total without it, and replicas get the same bits. A rank whose batch
    is empty has nothing to run.

    Raises:
        UnsupportedError: It is set to communicate elsewhere than in its backward.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        assert wrapper.process_group is not None
        super().__init__([wrapper.process_group], next(wrapper.parameters()).device)
        self.wrapper: Any = wrapper
        self._refuse_settings()
        self._before: dict[str, bool] = {}

    def take_over(self) -> None:
        """Turn the wrapper's own communication off, until ``release``."""
        self._before = {name: getattr(self.wrapper, name) for name in _SYNCHRONISES}
        vars(self.wrapper).update(dict.fromkeys(_SYNCHRONISES, False))
        # If that is due, a rank's next forward would wait for the others'.
        self.wrapper.reducer._rebuild_buckets()  # noqa: SLF001
        self.wrapper.reducer._reset_state()  # noqa: SLF001

    def verify(self) -> None:
        """Refuse a wrapper whose own communication was turned on again."""
        self._refuse_settings()
        if self.wrapper.require_backward_grad_sync:
            raise RuntimeError(
                "require_backward_grad_sync of DistributedDataParallel was turned on after this "
                "clipping was made; leave it off until remove()"
            )
        # It shall expect no gradients, also after a forward without a backward.
        self.wrapper.reducer._reset_state()  # noqa: SLF001

    def release(self) -> None:
        """Let the wrapper communicate again."""
        vars(self.wrapper).update(self._before)

    @property
    def grouping(self) -> str:
        """Say how large buckets are."""
        return " ".join(map(str, self._bucket_limits))

    def release_sums(
        self, sums: dict[nn.Parameter, Tensor], add_noise: AddNoise, *, joins: bool = True
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters with their averages; the sums of a bucket travel together."""
        del joins  # buckets do
        ddp: Any = distributed  # which has no public name for the plan of DDP's own buckets
        parameters = list(sums)[::-1]
        all_sums = [sums[parameter] for parameter in parameters]
        buckets, _ = ddp._compute_bucket_assignment_by_size(  # noqa: SLF001
            all_sums, self._bucket_limits
        )
        del all_sums
        for bucket in buckets:
            together = [parameters[number] for number in bucket]
            own = [sums.pop(parameter) for parameter in together]
            released = release_among(self.groups[0], own, add_noise)
            yield from zip(together, released, strict=True)

    @property
    def _bucket_limits(self) -> list[int]:
        ddp: Any = distributed
        return [ddp._DEFAULT_FIRST_BUCKET_BYTES, self.wrapper.bucket_bytes_cap]  # noqa: SLF001

    def _refuse_settings(self) -> None:
        wrapper = self.wrapper
        is_predicted = distributed.get_backend(self.groups[0]) == distributed.Backend.FAKE
        refused = {
            "static_graph": wrapper.static_graph,
            "mixed_precision": wrapper.mixed_precision is not None,
            "the Python reducer": wrapper._use_python_reducer,  # noqa: SLF001
            "delay_all_reduce_named_params": bool(wrapper._delay_all_reduce_params),  # noqa: SLF001
            "register_comm_hook()": bool(wrapper._comm_hooks) and not is_predicted,  # noqa: SLF001
            "join()": wrapper._join_config.enable,  # noqa: SLF001
        }
        for name, is_set in refused.items():
            if is_set:
                raise UnsupportedError(
                    f"DistributedDataParallel with {name} does not work with clipping"
                )


def find_ranks(model: nn.Module) -> Ranks:
    """Find the ranks that train a model, if that is exact with clipping (``UnsupportedError``)."""
    _refuse_replicate(model)
    states = states_of(model)
    if isinstance(model, DistributedDataParallel):
        if states or any(is_distributed(parameter) for parameter in model.parameters()):
            raise UnsupportedError("DistributedDataParallel of sharded parameters does not work")
        return Replicas(model)
    if not states:
        return Ranks()
    # It takes as long to import as PyTorch itself.
    from dpprof.private.ranks.shards import Shards  # noqa: PLC0415

    return Shards(model, states)


def states_of(model: nn.Module) -> list[Any]:
    """List the states of ``fully_shard`` in a model."""
    getters = (getattr(module, "_get_fsdp_state", None) for module in model.modules())
    return list(dict.fromkeys(get_state() for get_state in getters if get_state is not None))


def groups_of(state: Any) -> list[Any]:
    """List the groups of parameters that a state of ``fully_shard`` gathers, each at once."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group at most, before PyTorch 2.12
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []  # noqa: SLF001
    return groups


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
