"""Book-keeping: one backward pass, which keeps contributions until the norms are known.

Source: Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost".
Autograd's own gradients of weights, which DP-SGD does not use, are never computed. For each matrix
it keeps the activations and output gradients, or the per-sample gradients where these have fewer
elements and, on tensor cores, take less time (``norms.linear``); for each vector its per-sample
gradients. Then it computes the clipped sum layer by layer, and frees what it kept.

Cost for a linear layer of d x p over T tokens: 6 B T d p FLOPs and the norm; where per-sample
gradients are kept 6 B T d p + 2 B d p in all. Memory beyond an ordinary step: at most B T (d + p)
elements for each linear layer, of which B T d are activations that an ordinary step holds until its
backward.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.private.contributions.alone import Alone
from dpprof.private.contributions.contributions import Kept, Versions
from dpprof.private.contributions.sample_gradients import SampleGradients, may_join
from dpprof.private.engine.batch import Batch, Enter
from dpprof.private.engine.engine import Clipping


class _KeptBatch(Batch):
    """A batch whose contributions are kept until the norms are known."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kept: dict[nn.Parameter, list[Kept]] = defaultdict(list)
        self._versions: dict[nn.Parameter, list[Versions]] = defaultdict(list)

    def clip(self, enter: Enter) -> None:
        enter("backward")
        with self.handling(self.norms.add):
            self.ranks.differentiate(self.losses, self.make_weights())
        enter("clip")
        with torch.no_grad():
            self._sum_all(self.find_factors())

    def _sum_all(self, factors_B: Tensor) -> None:
        if self.ranks.is_sharded:
            self.clipping.shard_sums.close_all(partial(self._sum, factors_B))
        vectors = [] if self.alone else self._take_vectors()
        for parameter in reversed(list(self._kept)):
            self._sum(factors_B, parameter)
        # Last: the products keep a GPU busy while Python prepares these.
        for on_device in vectors:
            self.add_up_vectors(on_device, factors_B)

    def _take_vectors(self) -> list[list[tuple[nn.Parameter, Tensor]]]:
        """Take the kept gradients of all vectors of each GPU: each is a launch otherwise."""
        vectors: dict[torch.device, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter, kept in reversed(list(self._kept.items())):
            only = kept[0]
            if isinstance(only, SampleGradients) and may_join(parameter, only.gradients):
                self._refuse_changed(parameter)
                vectors[only.gradients.device].append((parameter, only.gradients))
                del self._kept[parameter]
        return list(vectors.values())

    def keep(self, parameter: nn.Parameter, contribution: Kept) -> None:
        """Keep a contribution, and the versions of what other code has too."""
        if not (isinstance(contribution, SampleGradients) and contribution.is_own):
            self._versions[parameter].append(Versions(contribution))
        self._kept[parameter].append(contribution)

    def measure_alone(self, samples: Sequence[int]) -> Alone | None:
        if not samples:
            return None
        alone = Alone(samples)
        for contributions in self._kept.values():
            alone.measure(alone.take(contributions))
        return alone

    def _refuse_changed(self, parameter: nn.Parameter) -> None:
        for versions in self._versions.pop(parameter, ()):
            versions.verify(self.clipping.name_of(parameter))

    def _sum(self, factors_B: Tensor, parameter: nn.Parameter) -> None:
        """Add what is kept to the sum, unless a hook wrote it since its norm was found."""
        self._refuse_changed(parameter)
        contributions = self._kept.pop(parameter, [])
        taken = self.alone.take(contributions) if self.alone else {}
        self.add_up(parameter, contributions, factors_B, taken)


class BookKeeping(Clipping):
    """Flat clipping in one backward pass.

    Arguments, errors and what happens to NaN, infinity, zero and empty batches: ``Clipping``.

    Formal guarantees: those of ``Clipping``; the sum of all parameters' gradients has L2
    sensitivity ``max_grad_norm`` under adding or removing one sample.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> clipping = BookKeeping(model, max_grad_norm=0.5)
        >>> clipping.backward(model(torch.ones(2, 3)).squeeze(1))  # each gradient is (1, 1, 1)
        >>> round(float(model.weight.grad.norm()), 4)  # two of norm 0.5, in one direction
        1.0
    """

    keeps = True
    _batch_type = _KeptBatch
