"""How the sums of one model's ranks become one sum, with noise added once.

Each rank computes the whole gradient of its own samples, so no other rank needs their norms and
clipping factors. No gradient of a parameter passes through autograd, so neither DDP's buckets nor
FSDP's reduce-scatter carry one: the sums of clipped gradients are added here, undivided and in
float32 at least. ``Replicas`` do it in the optimizer's step, where every rank adds the noise of its
own part of the elements before the all-reduce; ``Shards`` in backward, parameter by parameter, onto
the shards to which each rank adds noise, as soon as ``ShardSums`` says.

The guarantee rests on this: every rank clips to one bound, each element gets noise from one rank,
and ranks' random numbers are independent. Before anything is applied, ranks compare what they are
set to (``agree``), and seeds come from rank 0 (``make_generator``).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from dpprof.spec.registry import UnsupportedError

AddNoise = Callable[..., None]
"""Adds noise to its first argument, and averages all."""

_GOLDEN = 0x9E3779B9
"""Odd, so its multiples differ modulo 2^32; of a Weyl sequence."""


class Ranks:
    """The ranks that train one model; without a process group the one process alone.

    Args:
        group: Their process group.
        device: Of the parameters.
    """

    wrapper: nn.Module | None = None
    """The ``DistributedDataParallel`` that may run the model."""

    is_sharded = False
    """Whether sums are reduced onto shards in backward."""

    def __init__(self, group: Any = None, device: torch.device | None = None) -> None:
        self.group, self.device = group, device or torch.device("cpu")
        self.rank, self.size = 0, 1
        if group is not None:
            self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that an optimizer trains, of one that a layer has at present.

        Raises:
            UnsupportedError: It is distributed in a way that clipping does not know.
        """
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

    def take_over(self) -> None:
        """Change what must be changed while a clipping is attached."""

    def release(self) -> None:
        """Restore what was changed."""

    def agree(self, settings: Mapping[str, float | str], seed: int | None = None) -> None:
        """Verify that all ranks have the same settings, and that no two have one seed.

        Raises:
            RuntimeError: They differ; every rank raises it.
        """
        if self.group is None:
            return
        own = [_number(setting) for setting in settings.values()] + [float(seed or 0)]
        mine = torch.tensor(own, dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(gathered, mine, group=self.group)
        if isinstance(mine, FakeTensor):  # of a prediction, which has one rank and no elements
            return
        *columns, seeds = zip(*(one.tolist() for one in gathered), strict=True)
        for (name, setting), values in zip(settings.items(), columns, strict=True):
            other = next((r for r, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                both = "" if isinstance(setting, str) else f": {values[0]:g} and {values[other]:g}"
                raise RuntimeError(f"{name} differs between rank 0 and rank {other}{both}")
        if seed is not None and len(set(seeds)) < self.size:
            raise RuntimeError(
                "two ranks draw noise from one seed, so their noise is not independent; leave the "
                "optimizer's generator as it is"
            )

    def any(self, holds: bool) -> bool:
        """Tell whether something holds on this rank; where it is sharded, on any, and all ask."""
        return holds

    def add_to_shard(self, parameter: nn.Parameter, total: Tensor | None, bound: float) -> None:
        """Reduce a sum onto the shards of all ranks, of those that are sharded."""
        raise NotImplementedError

    def make_generator(self, source: torch.Generator | None) -> torch.Generator | None:
        """Make a generator whose seed no other rank has, from the next number of rank 0's.

        Without a source the number is the operating system's.
        """
        if self.size == 1:
            return source
        if source is None:
            base = torch.tensor([torch.Generator().seed() % 2**63])
        else:
            base = torch.randint(2**63 - 1, (1,), generator=source, device=source.device)
        base = base.to(self.device)
        distributed.broadcast(base, group=self.group, group_src=0)
        if isinstance(base, FakeTensor):
            return torch.Generator(self.device)
        seed = seed_of_rank(int(base), self.rank)
        return torch.Generator(self.device).manual_seed(seed)

    def release_sum(self, summed: Tensor, add_noise: AddNoise) -> Tensor:
        """Return the noised average over all ranks, of this rank's sum."""
        add_noise(summed)
        return summed


class ShardSums:
    """The sums of one rank, until each is reduced.

    A first pass counts the uses of each parameter. Once ranks agree on them, a sum is reduced as
    soon as all its uses were added, in the same order on all ranks. The sums of the earlier parts
    of a batch wait until its last part comes.

    Args:
        ranks: Reduces a sum.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._bound = 0.0
        self._continues = False
        self._uses: Counter[nn.Parameter] = Counter()
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._waiting: dict[nn.Parameter, Tensor | None] = {}
        """Of the earlier parts of a batch, by parameter; None for zeros."""

        self.is_counting = False
        """Whether a first pass counts uses."""

    @property
    def order(self) -> list[nn.Parameter]:
        """The parameters that were used and are not reduced yet."""
        return list(self._uses)

    def start(self, bound: float, *, continues: bool) -> None:
        """Start a part of a batch, clipped to a bound; where other parts come, its sums wait."""
        self._verify(bound)
        self._continues = continues
        self.is_counting = True

    def count(self, parameter: nn.Parameter) -> None:
        """Count a use, in the first pass."""
        self._uses[parameter] += 1

    def agree(self, names: dict[nn.Parameter, str]) -> None:
        """Compare with other ranks what was used, and how it is clipped."""
        used = [f"{names[p]} {count}" for p, count in self._uses.items()]
        self._ranks.agree(
            {
                "max_grad_norm": self._bound,
                "whether this part of a batch is the last": float(self._continues),
                "which layers ran, or their order,": "\n".join(used),
            }
        )
        self.is_counting = False

    def add(self, parameter: nn.Parameter, summed: Tensor) -> None:
        """Add the sum of one use over this rank's samples."""
        total = self._totals.get(parameter)
        self._totals[parameter] = summed if total is None else total.add_(summed)

    def end_use(self, parameter: nn.Parameter) -> None:
        """Count a use in the second pass; the last closes the sum."""
        self._uses[parameter] -= 1
        if self._uses[parameter] == 0:
            self.close(parameter)

    def close(self, parameter: nn.Parameter) -> None:
        """Reduce a sum and free it; or let it wait for the other parts of the batch."""
        del self._uses[parameter]
        total = self._totals.pop(parameter, None)
        before = self._waiting.pop(parameter, None)
        if total is not None and before is not None:
            total.add_(before)
        total = before if total is None else total
        if self._continues:
            self._waiting[parameter] = total
        else:
            self._ranks.add_to_shard(parameter, total, self._bound)

    def finish(self) -> None:
        """Verify that all sums are closed, and reduce those of other parts of the batch.

        Raises:
            RuntimeError: The two passes differ.
        """
        if self._uses or self._totals:
            raise RuntimeError("the second backward pass used other parameters than the first")
        if not self._continues:
            self.reduce(self._bound)

    def reduce(self, bound: float) -> None:
        """Reduce all sums that wait."""
        self._verify(bound)
        for parameter in list(self._waiting):
            self._ranks.add_to_shard(parameter, self._waiting.pop(parameter), bound)

    def forget(self) -> None:
        """Free the sums of a batch that is not applied."""
        for one in (self._uses, self._totals, self._waiting):
            one.clear()
        self.is_counting = False

    def _verify(self, bound: float) -> None:
        """Refuse another bound than that of the earlier parts."""
        if self._waiting and self._bound != bound:
            raise RuntimeError("max_grad_norm changed between the parts of a batch")
        self._bound = bound


def seed_of_rank(base: int, rank: int) -> int:
    """Derive a rank's seed; the seeds of 2^32 ranks differ in their lower 32 bits.

    PyTorch's generator on a CPU ignores the others.
    """
    low = (base + rank * _GOLDEN) % 2**32
    return base >> 32 << 32 | low


def distinct_part(generator: torch.Generator) -> int:
    """Return the part of a generator's seed that decides its numbers."""
    return generator.initial_seed() % 2**32


def is_distributed(parameter: Tensor) -> bool:
    """Tell whether a tensor is a ``DTensor``, without importing that."""
    return hasattr(parameter, "placements")


def refuse_other_wrapper(ranks: Ranks) -> None:
    """Refuse to run a layer inside of a wrapper that the clipping does not know.

    Raises:
        UnsupportedError: ``DistributedDataParallel`` runs the model.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and active is not ranks.wrapper:
        raise UnsupportedError(
            "DistributedDataParallel runs this model, and its Clipping does not know; make the "
            "Clipping of the DistributedDataParallel itself"
        )


def _number(setting: float | str) -> float:
    """Return a number that is the same for equal settings alone; exact in float64."""
    if isinstance(setting, str):
        return float(int.from_bytes(hashlib.sha256(setting.encode()).digest()[:6], "big"))
    return float(setting)
