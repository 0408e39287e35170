"""Per-layer clipping in one backward pass; not flat clipping.

Cost per linear layer: as ``flash-bk``, but no output gradients are kept.
"""

from typing import ClassVar

from dpprof.private.engine.per_layer import PerLayerClipping
from dpprof.subjects.methods.clipped import ClippedStep


class PerLayer(ClippedStep):
    """A step of ``PerLayerClipping``.

    Formal guarantees: each of L layers is clipped to C / sqrt(L), so the sum before noise has L2
    sensitivity ``max_grad_norm`` under adding or removing one sample.
    """

    mechanism: ClassVar[str] = "per-layer clipping"
    parallel_kinds = ()
    clipping_type = PerLayerClipping
