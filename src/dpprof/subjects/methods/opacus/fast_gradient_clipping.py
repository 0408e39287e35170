"""Opacus's fast gradient clipping: per-sample gradients of one layer at a time.

Each layer's per-sample gradients are computed, reduced to their norms and freed. Cost per linear
layer of d x p: 12 B T d p FLOPs. Memory: B d p elements for one layer at a time.
"""

from typing import ClassVar

from dpprof.subjects.methods.opacus.two_pass import OpacusTwoPass


class OpacusFastGradientClipping(OpacusTwoPass):
    """``GradSampleModuleFastGradientClipping`` with ``use_ghost_clipping=False``."""

    use_ghost_clipping = False
    unsupported_ranks: ClassVar = {
        "fsdp": "Opacus's module for FSDP ignores use_ghost_clipping=False and computes ghost "
        "norms, as the method opacus-ghost does"
    }
