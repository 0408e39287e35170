"""Keeps a rank's sums until all of a group of ``fully_shard`` are there, and has them reduced.

The order is that of the first backward pass, which ranks compare; ``shards`` reduces.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from dpprof.private.ranks.ranks import Ranks, Reduction


class ShardSums:
    """The sums of one rank, until they are reduced, group by group of ``fully_shard``.

    A first pass counts the uses of each parameter. Once ranks agree on them and on their order, the
    sums of a group are reduced together as soon as all uses of all its parameters were added.
    Groups come in the order of their last uses in that first pass, also where another group is
    complete earlier, so all ranks reduce them in one order. A parameter that was not used is left
    out. The sums of the earlier parts of a batch wait until its last part comes.

    Memory: a group's sums until its last use, and then its buffer and one sum.

    ``ranks`` reduce sums, and ``add`` gets a parameter and its reduced sum.
    """

    def __init__(self, ranks: Ranks, add: Callable[[nn.Parameter, Tensor], None]) -> None:
        self._ranks, self._add = ranks, add
        self._bound = 0.0
        self._continues = False
        self._uses: dict[nn.Parameter, int] = {}  # in the order of last uses
        self._groups: list[list[nn.Parameter]] = []  # not reduced yet, in their order
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._waiting: dict[nn.Parameter, Tensor | None] = {}  # of earlier parts; None for zeros
        self._begun: Reduction | None = None  # of the first group, but for its last sum
        self.is_counting = False  # whether a first pass counts uses

    def start(self, bound: float, *, continues: bool) -> None:
        """Start a part of a batch, clipped to a bound; where other parts come, its sums wait."""
        self._verify(bound)
        self._continues = continues
        self.is_counting = True

    def count(self, parameter: nn.Parameter) -> None:
        """Count a use, in the first pass."""
        self._uses[parameter] = self._uses.pop(parameter, 0) + 1

    def agree(self, names: Mapping[nn.Parameter, str], *, has_late_ways: bool) -> None:
        """Compare with other ranks what was used, and how it is clipped."""
        used = [f"{names[p]} {count}" for p, count in self._uses.items()]
        of_sums: dict[str, float | str] = {
            "max_grad_norm": self._bound,
            "whether this part of a batch is the last": float(self._continues),
            "which layers ran, or their order,": "\n".join(used),
            "whether code outside of layers was verified": float(has_late_ways),
            "what waits of earlier parts of the batch": "\n".join(names[p] for p in self._waiting),
        }
        self._ranks.agree(of_sums)
        self.is_counting = False
        late = () if self._continues else self._waiting
        self._groups = _by_group(self._ranks, dict.fromkeys((*self._uses, *late)))

    def begin_use(self, parameter: nn.Parameter) -> None:
        """Prepare for the sum of a use in the second pass: before a group's last, make room."""
        first = self._groups[0] if self._groups else ()
        left = sum(self._uses.get(p, 0) for p in first)
        if left == 1 == self._uses.get(parameter) and any(p is parameter for p in first):
            self._begin()

    def add(self, parameter: nn.Parameter, summed: Tensor) -> None:
        """Add the sum of one use over this rank's samples."""
        if self._begun is not None:
            self._begun.add(parameter, summed)
            return
        total = self._totals.get(parameter)
        self._totals[parameter] = summed if total is None else total.add_(summed)

    def end_use(self, parameter: nn.Parameter) -> None:
        """Count a use in the second pass; the last of a group closes its sums."""
        self._uses[parameter] = self._uses.get(parameter, 0) - 1
        while self._groups and not any(self._uses.get(p) for p in self._groups[0]):
            self._close()

    def close_all(self, compute: Callable[[nn.Parameter], None]) -> None:
        """Close the sums of every group; ``compute`` adds all uses of a parameter only then."""
        self._uses.clear()
        while self._groups:
            self._begin()
            for parameter in self._groups[0]:
                compute(parameter)
            self._close()

    def _begin(self) -> None:
        """Move what there is of the first group to where it is reduced, unless parts follow."""
        if self._continues:
            return
        self._begun = self._ranks.begin_reduction(self._groups[0])
        for sums in (self._waiting, self._totals):
            for parameter in self._groups[0]:
                summed = sums.pop(parameter, None)
                if summed is not None:
                    self._begun.add(parameter, summed)

    def _close(self) -> None:
        """Reduce the sums of the first group and free them; or let them wait for other parts."""
        if self._begun is None:
            self._begin()
        parameters = self._groups.pop(0)
        if self._begun is not None:
            self._begun.finish(self._add)
            self._begun = None
            return
        for parameter in parameters:
            total = self._totals.pop(parameter, None)
            before = self._waiting.get(parameter)
            if total is not None and before is not None:
                total.add_(before)
            self._waiting[parameter] = before if total is None else total

    def finish(self) -> None:
        """Verify that all sums of a batch are closed (``RuntimeError``)."""
        if self._groups or self._totals or any(self._uses.values()):
            raise RuntimeError("the second backward pass used other parameters than the first")
        self._uses.clear()

    def reduce_waiting(self, bound: float) -> None:
        """Reduce all sums that wait."""
        self._verify(bound)
        self._continues = False
        self._groups = _by_group(self._ranks, self._waiting)
        while self._groups:
            self._close()

    def forget(self) -> None:
        """Free the sums of a batch that is not applied."""
        for sums in (self._uses, self._groups, self._totals, self._waiting):
            sums.clear()
        self._begun = None
        self.is_counting = False

    def _verify(self, bound: float) -> None:
        """Refuse another bound than that of the earlier parts."""
        if self._waiting and self._bound != bound:
            raise RuntimeError("max_grad_norm changed between the parts of a batch")
        self._bound = bound


def _by_group(ranks: Ranks, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """List parameters by group, the groups in the order of their last ones."""
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        number = ranks.group_of(parameter)
        groups[number] = [*groups.pop(number, ()), parameter]
    return list(groups.values())
