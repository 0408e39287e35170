"""Finds how a model is distributed: not at all, by DDP, or by FSDP2; and the ranks of DDP.

Under DDP each rank has a replica of the model. ``DistributedDataParallel`` makes replicas equal at
the start, as ever. Its reduction of gradients is switched off, as ``no_sync`` does: each rank keeps
the sum over its own samples, batch after batch, until the step. There each rank adds noise to its
own part of the elements, and one all-reduce for each bucket adds sums and noise. So the noise of
the total has standard deviation sigma C exactly, no rank sees the total without it, and replicas
get the same bits. A rank whose batch is empty has nothing to run.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from dpprof.private.errors import UnsupportedError
from dpprof.private.ranks.ranks import AddNoise, Ranks, is_distributed

_SYNCHRONISES = ("require_backward_grad_sync", "require_forward_param_sync")


def find_ranks(model: nn.Module) -> Ranks:
    """Find the ranks that train a model.

    Raises:
        UnsupportedError: It is distributed in a way that is not exact with clipping.
    """
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


class Replicas(Ranks):
    """The ranks of a ``DistributedDataParallel``.

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
        self._disarm()

    def verify(self) -> None:
        """Refuse a wrapper whose own communication was turned on again."""
        self._refuse_settings()
        if self.wrapper.require_backward_grad_sync:
            raise RuntimeError(
                "require_backward_grad_sync of DistributedDataParallel was turned on after this "
                "clipping was made; leave it off until remove()"
            )
        self._disarm()

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
        parameters = list(sums)[::-1]
        all_sums = [sums[parameter] for parameter in parameters]
        buckets = self._plan_buckets(all_sums)
        del all_sums
        for bucket in buckets:
            together = [parameters[number] for number in bucket]
            own = [sums.pop(parameter) for parameter in together]
            released = self.release_among(self.groups[0], own, add_noise)
            yield from zip(together, released, strict=True)

    def _plan_buckets(self, sums: list[Tensor]) -> list[list[int]]:
        """Return the numbers of sums by bucket, as DDP plans its own."""
        ddp: Any = distributed  # which has no public name for it
        buckets: list[list[int]]
        buckets, _ = ddp._compute_bucket_assignment_by_size(  # noqa: SLF001
            sums, self._bucket_limits
        )
        return buckets

    @property
    def _bucket_limits(self) -> list[int]:
        ddp: Any = distributed  # which has no public name for it
        return [ddp._DEFAULT_FIRST_BUCKET_BYTES, self.wrapper.bucket_bytes_cap]  # noqa: SLF001

    def _disarm(self) -> None:
        """Let the wrapper expect no gradients, also after a forward without a backward."""
        self.wrapper.reducer._reset_state()  # noqa: SLF001

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
