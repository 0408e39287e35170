"""Flash clipping: norms in one backward pass, the clipped sum in a second.

Source: fast gradient clipping (Goodfellow 2015; Lee and Kifer 2021, "Scaling up
Differentially Private Deep Learning with Fast Per-Example Gradient Clipping") with norms
that make neither a sample's gradient nor T x T matrices. The first pass computes no
gradients of parameters; the second frees the graph as it goes. Where others differentiate
weighted losses, both passes here differentiate the same ones, and each layer weights what it
sums: so the second pass sums the numbers whose norms the first has found, and a sample that
is not finite can be left out.

Cost for a linear layer of d x p over T tokens: 2 B T d p FLOPs each for forward, inputs'
gradients twice and weights' gradients, 8 B T d p, and the norm (``norms.plan``).
Memory beyond an ordinary step: the graph, kept from one pass to the next; B norms; at most
``norms.tiles.WORKSPACE_BYTES`` while a norm is computed; one layer's weighted input or output
gradient, whichever is narrower.
"""

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import Contribution
from dpprof.clipping.engine import Clipping, Enter, weigh
from dpprof.clipping.layers import Added


class FlashClipping(Clipping):
    """Flat clipping in two backward passes, nothing kept but the graph.

    Arguments, errors and what happens to NaN, infinity, zero and empty batches: ``Clipping``.

    Formal guarantees: those of ``Clipping``; the sum of all parameters' gradients has L2
    sensitivity ``max_grad_norm`` under adding or removing one sample.

    Example:
        >>> import torch
        >>> from dpprof.clipping import FlashClipping
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> clipping = FlashClipping(model, max_grad_norm=0.5)
        >>> clipping.backward(model(torch.ones(2, 3)).squeeze(1))  # each gradient is (1, 1, 1)
        >>> round(float(model.weight.grad.norm()), 4)  # two of norm 0.5, in one direction
        1.0
    """

    def _clip(self, losses: Tensor, enter: Enter) -> None:
        enter("backward")
        with self._handing_over(self._find_norms):
            torch.autograd.backward(losses, weigh(losses), retain_graph=True)
        enter("clip")
        factors_B = self._settle()

        def add_up(_layer: nn.Module, added: Added) -> None:
            for parameter, contribution in added:
                self._sum_up(parameter, contribution, factors_B)

        enter("second_backward")
        with self._handing_over(add_up):
            torch.autograd.backward(losses, weigh(losses))

    def _keep(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        pass
