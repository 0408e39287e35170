"""Opacus's per-sample gradients from backward hooks, by a rule for each type of layer.

Cost per linear layer of d x p: 2 B T d p FLOPs beyond the standard step's 6 B T d p, because the
ordinary gradient is computed too.
"""

from dpprof.subjects.methods.opacus.per_sample import OpacusPerSample


class OpacusHooks(OpacusPerSample):
    """``grad_sample_mode="hooks"``."""

    grad_sample_mode = "hooks"
