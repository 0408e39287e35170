"""Opacus's per-sample gradients from PyTorch's expanded weights.

``GradSampleModuleExpandedWeights``: layers compute per-sample gradients instead of
ordinary ones, so a linear layer costs no more than standard's 6 B T d p FLOPs.
"""

from opacus.grad_sample import GradSampleModuleExpandedWeights
from torch import nn

from dpprof.methods.opacus_per_sample import OpacusPerSample


class OpacusEw(OpacusPerSample):
    """``grad_sample_mode="ew"``."""

    @staticmethod
    def wrap(model: nn.Module) -> GradSampleModuleExpandedWeights:
        """Have the model called with expanded weights."""
        return GradSampleModuleExpandedWeights(model, batch_first=True, loss_reduction="mean")
