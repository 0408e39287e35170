"""Exact flat clipping in two backward passes.

Cost per linear layer of d x p: 8 B T d p FLOPs and the cheaper of B T^2 (d + p) and 2 B T d p.
"""

from torch._functorch import config

from dpprof.private.engine.flash_clipping import FlashClipping
from dpprof.subjects.methods.clipped import ClippedStep


class Flash(ClippedStep):
    """A step of ``FlashClipping``.

    Formal guarantees: the sum before noise has L2 sensitivity ``max_grad_norm`` under adding or
    removing one sample.
    """

    clipping_type = FlashClipping

    def compile(self) -> None:
        """Compile code that does not overwrite what it saved: the second backward reads it."""
        config.donated_buffer = False
        super().compile()
