"""Per-layer clipping in one backward pass: another mechanism than flat clipping.

``clipping.per_layer`` says how, and what it does to a gradient. Cost per linear layer as
``flash-bk``'s, but nothing is kept.
"""

from collections.abc import Sequence
from typing import ClassVar

from dpprof.clipping.per_layer import PerLayerClipping
from dpprof.methods.clipped import ClippedStep
from dpprof.methods.training_step import ClipGroup


class PerLayer(ClippedStep):
    """One step of ``PerLayerClipping``.

    Formal guarantees: each of L layers is clipped to C / sqrt(L), so the sum before noise
    has L2 sensitivity ``max_grad_norm`` under adding or removing one sample.
    """

    mechanism: ClassVar[str] = "per-layer clipping"
    clipping_type = PerLayerClipping
    clipping: PerLayerClipping

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Tell that each layer is clipped by itself."""
        layers = (layer.parameters(recurse=False) for layer in self.module.modules())
        trainable = ([p for p in layer if p.requires_grad] for layer in layers)
        return [ClipGroup(own, self.clipping.bound) for own in trainable if own]
