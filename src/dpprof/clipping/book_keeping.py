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
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import (
    ChunkedProduct,
    Convolution,
    Kept,
    Lookup,
    Product,
    SampleGradients,
    may_join,
)
from dpprof.clipping.engine import Clipping, Enter
from dpprof.clipping.sample_norms import SampleNorms


class BookKeeping(Clipping):
    """Flat clipping in one backward pass.

    Arguments, errors and what happens to NaN, infinity, zero and empty batches: ``Clipping``.

    Formal guarantees: those of ``Clipping``; the sum of all parameters' gradients has L2
    sensitivity ``max_grad_norm`` under adding or removing one sample.

    Example:
        >>> import torch
        >>> from dpprof.clipping import BookKeeping
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> clipping = BookKeeping(model, max_grad_norm=0.5)
        >>> clipping.backward(model(torch.ones(2, 3)).squeeze(1))  # each gradient is (1, 1, 1)
        >>> round(float(model.weight.grad.norm()), 4)  # two of norm 0.5, in one direction
        1.0
    """

    keeps = True

    def __init__(self, model: nn.Module, max_grad_norm: float, **options: Any) -> None:
        super().__init__(model, max_grad_norm, **options)
        self._kept: list[tuple[nn.Parameter, Kept]] = []
        self._versions: dict[int, int] = {}

    def _clip(self, losses: Tensor, norms: SampleNorms, enter: Enter) -> None:
        try:
            enter("backward")
            with self.handling(norms.add):
                torch.autograd.backward(losses, self._make_weights(losses))
            enter("clip")
            factors_B = self._finish(norms)
            if self.ranks.is_sharded:
                self._reduce_kept(factors_B)
            vectors = self._take_vectors()
            while self._kept:
                self._sum(*self._kept.pop(), factors_B)
            # Last: the products keep a GPU busy while Python prepares these.
            for on_device in vectors:
                self._add_up_vectors(on_device, factors_B)
        finally:
            self._kept.clear()
            self._versions.clear()

    def _take_vectors(self) -> list[list[tuple[nn.Parameter, Tensor]]]:
        """Take the kept gradients of all vectors of each GPU, to be summed at once.

        Each takes a launch otherwise.
        """
        vectors: dict[torch.device, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        others: list[tuple[nn.Parameter, Kept]] = []
        for parameter, contribution in self._kept:
            if isinstance(contribution, SampleGradients) and may_join(parameter, contribution[0]):
                gradients = contribution.gradients
                vectors[gradients.device].append((parameter, gradients))
            else:
                others.append((parameter, contribution))
        self._kept[:] = others
        return list(vectors.values())

    def _reduce_kept(self, factors_B: Tensor) -> None:
        """Compute and reduce sums, group by group."""
        kept: dict[nn.Parameter, list[Kept]] = defaultdict(list)
        while self._kept:
            parameter, contribution = self._kept.pop()
            kept[parameter].append(contribution)

        def compute(parameter: nn.Parameter) -> None:
            for contribution in kept.pop(parameter, ()):
                self._sum(parameter, contribution, factors_B)

        self.shard_sums.close_all(compute)

    def _keep(self, parameter: nn.Parameter, contribution: Kept) -> None:
        for tensor in _exposed(contribution):
            self._versions[id(tensor)] = tensor._version  # noqa: SLF001 (it has no public name)
        self._kept.append((parameter, contribution))

    def _sum(self, parameter: nn.Parameter, contribution: Kept, factors_B: Tensor) -> None:
        """Add a kept contribution to the sum, unless a hook wrote it since its norm was found."""
        for tensor in _exposed(contribution):
            if tensor._version != self._versions[id(tensor)]:  # noqa: SLF001
                raise RuntimeError(
                    f"an activation or output gradient that was kept for {self.name_of(parameter)} "
                    "was changed in place after its norm was found, by a hook maybe; change a copy"
                )
        self._add_up(parameter, contribution, factors_B)


def _exposed(contribution: Kept) -> list[Tensor]:
    """List the tensors of a contribution that other code has too."""
    if not isinstance(contribution, Product | ChunkedProduct | Convolution | Lookup):
        return []
    read = contribution.read if isinstance(contribution, ChunkedProduct) else ()
    return [part for part in (*contribution, *read) if isinstance(part, Tensor)]
