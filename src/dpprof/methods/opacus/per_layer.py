"""Opacus's per-layer clipping: every parameter's gradient to a bound of its own.

Another mechanism than flat clipping, and another bias: what a sample contributes is not
scaled as a whole, its direction changes. It does not equal ``microbatch`` and is not meant to.

Per-sample gradients are those of ``opacus-hooks``, at the same cost. Clipping needs no norm
over all parameters, so each is scaled and summed as soon as its own norms are known.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from opacus.optimizers import DPPerLayerOptimizer
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from dpprof.methods.opacus.hooks import OpacusHooks
from dpprof.methods.opacus.optimizer import wrap_optimizer
from dpprof.methods.training_step import ClipGroup
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError


class OpacusPerLayer(OpacusHooks):
    """``grad_sample_mode="hooks"`` with ``clipping="per_layer"``.

    Each of the k trainable parameters has the bound C_i = C / sqrt(k), C being
    ``max_grad_norm``. Noise of standard deviation sigma C is added to every element.

    Formal guarantees: the sum before noise has L2 sensitivity sqrt(sum of C_i^2) = C under
    adding or removing one sample; C_i is that of parameter i alone.

    Raises:
        UnsupportedError: ``bfloat16``: ``DPPerLayerOptimizer`` does not turn per-sample gradients
            into the parameter's dtype, as ``DPOptimizer`` does, and PyTorch refuses the sum.
    """

    mechanism: ClassVar[str] = "per-parameter clipping"

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if experiment.dtype == "bfloat16":
            raise UnsupportedError("Opacus's per-layer optimizer does not work under autocast")
        super().__init__(model, experiment)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer in Opacus's ``DPPerLayerOptimizer``."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        bounds = [self.experiment.max_grad_norm / math.sqrt(count)] * count
        # It finds C with tensors: these have elements wherever the model has none.
        with unset_fake_temporarily():
            self.optimizer = wrap_optimizer(
                DPPerLayerOptimizer, optimizer, self.experiment, max_grad_norm=bounds
            )

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Tell that each parameter is clipped by itself."""
        bounds = self.optimizer.max_grad_norms
        # As Opacus pairs them: bounds are alike, and one is left for each that was frozen since.
        pairs = zip(self.optimizer.params, bounds, strict=False)
        return [ClipGroup([parameter], bound) for parameter, bound in pairs]
