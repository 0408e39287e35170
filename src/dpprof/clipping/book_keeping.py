"""Book-keeping: one backward pass, whose output gradients are kept until norms are known.

Source: Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost".
What autograd would compute as weights' gradients, only to throw it away, is never computed.
Kept are, for each matrix, its inputs and output gradients or each sample's gradient,
whichever has fewer elements (``norms.plan``); for each vector its gradient of each sample.
The clipped sum is formed layer by layer, and what it was made of let go.

Cost for a linear layer of d x p over T tokens: 6 B T d p FLOPs and the norm; where samples'
gradients are kept 6 B T d p + 2 B d p in all. Memory beyond an ordinary step:
B min(T (d + p), d p) elements for each linear layer, of which T d an ordinary step holds
too, until its backward is over.
"""

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import Contribution
from dpprof.clipping.engine import Clipping, Enter, weigh


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

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        super().__init__(model, max_grad_norm)
        self._kept: list[tuple[nn.Parameter, Contribution]] = []

    def _clip(self, losses: Tensor, enter: Enter) -> None:
        try:
            enter("backward")
            with self._handing_over(self._find_norms):
                torch.autograd.backward(losses, weigh(losses))
            enter("clip")
            factors_B = self._settle()
            while self._kept:
                self._sum_up(*self._kept.pop(), factors_B)
        finally:
            self._kept.clear()

    def _keep(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        self._kept.append((parameter, contribution))
