"""Opacus's per-sample gradients from ``torch.func``, for every layer.

A hook runs each layer's forward and backward pass again under ``vmap``. Cost per linear layer of
d x p: 4 B T d p FLOPs beyond the standard step's 6 B T d p.
"""

from dpprof.subjects.methods.opacus.per_sample import OpacusPerSample


class OpacusFunctorch(OpacusPerSample):
    """``grad_sample_mode="functorch"``."""

    grad_sample_mode = "functorch"
