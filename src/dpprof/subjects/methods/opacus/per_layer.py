"""Opacus's per-layer clipping: every parameter's gradient has a bound of its own.

It is not flat clipping and does not equal ``microbatch``: clipping changes the direction of a
sample's gradient. Per-sample gradients are those of ``opacus-hooks``, at the same cost. Each is
scaled and summed as soon as its own norms are known, because no norm over all parameters is needed.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.opacus.hooks import OpacusHooks
from dpprof.subjects.methods.training_step import ClipGroup


class OpacusPerLayer(OpacusHooks):
    """``grad_sample_mode="hooks"`` with ``clipping="per_layer"``.

    Each of the k trainable parameters has the bound C_i = C / sqrt(k), where C is
    ``max_grad_norm``. Every element gets noise of standard deviation sigma C.

    Formal guarantees: the sum before noise has L2 sensitivity sqrt(sum of C_i^2) = C under adding
    or removing one sample.

    Raises:
        UnsupportedError: ``bfloat16``: unlike ``DPOptimizer``, ``DPPerLayerOptimizer`` does not
            convert per-sample gradients to the parameter's dtype, so PyTorch refuses the sum.
    """

    mechanism: ClassVar[str] = "per-parameter clipping"
    clipping = "per_layer"

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if experiment.autocast_dtype is not None:
            raise UnsupportedError("Opacus's per-layer optimizer does not work under autocast")
        super().__init__(model, experiment)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer in Opacus's, with a bound for each parameter."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        bounds = [self.experiment.max_grad_norm / math.sqrt(count)] * count
        # Opacus computes C with tensors, which must be real even if the model's are fake.
        with unset_fake_temporarily():
            self.wrap_optimizer(optimizer, max_grad_norm=bounds)

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Return one group for each parameter."""
        bounds = self.optimizer.max_grad_norms
        # Opacus pairs them in this way too: all bounds are equal, and parameters that were frozen
        # after set-up leave some bounds over.
        pairs = zip(self.optimizer.params, bounds, strict=False)
        return [ClipGroup([parameter], bound) for parameter, bound in pairs]
