"""Flash clipping: norms in one backward pass, the clipped sum in a second.

Source: fast gradient clipping (Goodfellow 2015; Lee and Kifer 2021, "Scaling up
Differentially Private Deep Learning with Fast Per-Example Gradient Clipping") with norms
that make neither a sample's gradient nor T x T matrices. The first pass computes no
gradients of parameters; the second frees the graph as it goes.

Cost for a linear layer of d x p over T tokens: 2 B T d p FLOPs each for forward, inputs'
gradients twice and weights' gradients, 8 B T d p, and the norm (``norms.plan``).
Memory beyond an ordinary step: the graph, kept from one pass to the next; B norms; at most
``norms.tiles.WORKSPACE_BYTES`` while a norm is computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpprof.clipping.engine import Clipping, Enter, as_gradient, weigh
from dpprof.clipping.layers import Added
from dpprof.clipping.shares import Share


class FlashClipping(Clipping):
    """Two backward passes, nothing kept but the graph."""

    def _clip(self, losses: Tensor, enter: Enter) -> None:
        enter("backward")
        with self._handing_over(self._find_norms):
            torch.autograd.backward(losses, weigh(losses), retain_graph=True)
        enter("clip")
        factors = self._settle()
        enter("second_backward")
        with self._handing_over(_sum_up, differentiates=True):
            torch.autograd.backward(losses, weigh(losses, factors))

    def _keep(self, parameter: nn.Parameter, share: Share) -> None:
        pass


def _sum_up(_layer: nn.Module, added: Added) -> Sequence[Tensor | None]:
    """Compute gradients as autograd would; the losses carry the weights."""
    return [
        None if parameter is None or share is None else as_gradient(share.sum(None), parameter)
        for parameter, share in added
    ]
