"""Opacus's per-sample gradients from ``torch.func``, for every layer.

``GradSampleModule`` with ``force_functorch=True``: a hook runs each layer's forward and
backward again under ``vmap``. Cost per linear layer of d x p over standard's 6 B T d p
FLOPs: 4 B T d p.
"""

from opacus.grad_sample import GradSampleModule
from torch import nn

from dpprof.methods.opacus.per_sample import OpacusPerSample


class OpacusFunctorch(OpacusPerSample):
    """``grad_sample_mode="functorch"``."""

    @staticmethod
    def wrap(model: nn.Module) -> GradSampleModule:
        """Attach Opacus's hooks, with no layer's own rule in use."""
        return GradSampleModule(
            model, batch_first=True, loss_reduction="mean", force_functorch=True
        )
