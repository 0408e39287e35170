"""Sums of clipped gradients, on their way from one rank to the shards of all."""

from collections import Counter

from torch import Tensor, nn

from dpprof.clipping.ranks import Ranks


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
