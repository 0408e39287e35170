"""Sums of one batch's clipped gradients, on their way from one rank to the shards of all."""

from collections import Counter

from torch import Tensor, nn

from dpprof.clipping.ranks import Ranks


class WaitingSums:
    """Whole sums of the earlier parts of a batch, until its last part comes.

    Args:
        ranks: Reduces a sum.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._bound = 0.0
        self.totals: dict[nn.Parameter, Tensor | None] = {}
        """By parameter; None for zeros."""

    def verify(self, bound: float) -> None:
        """Refuse another bound than that of the earlier parts."""
        if self.totals and self._bound != bound:
            raise RuntimeError("max_grad_norm changed between the parts of a batch")
        self._bound = bound

    def reduce(self, bound: float) -> None:
        """Reduce all sums."""
        self.verify(bound)
        for parameter in list(self.totals):
            self._ranks.add_to_shard(parameter, self.totals.pop(parameter), bound)


class ShardSums:
    """The sums of one batch on one rank, until each is reduced.

    A first pass counts the uses of each parameter. Once ranks agree on them, a sum is reduced as
    soon as all its uses were added, in the same order on all ranks.

    Args:
        ranks: Reduces a sum.
        bound: To which the batch is clipped.
        waiting: The sums of the parts of the batch that came before.
        continues: Whether other parts come; then sums wait for these.
    """

    def __init__(
        self,
        ranks: Ranks,
        bound: float,
        waiting: WaitingSums,
        *,
        continues: bool,
    ) -> None:
        self._ranks, self._bound, self._waiting = ranks, bound, waiting
        self._continues = continues
        self._uses: Counter[nn.Parameter] = Counter()
        self._totals: dict[nn.Parameter, Tensor] = {}
        self.agreed = False

    @property
    def order(self) -> list[nn.Parameter]:
        """The parameters that were used and are not reduced yet."""
        return list(self._uses)

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
        self.agreed = True

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
        before = self._waiting.totals.pop(parameter, None)
        if total is not None and before is not None:
            total.add_(before)
        total = before if total is None else total
        if self._continues:
            self._waiting.totals[parameter] = total
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
            self._waiting.reduce(self._bound)
