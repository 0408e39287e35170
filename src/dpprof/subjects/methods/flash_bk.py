"""Exact flat clipping in one backward pass.

Cost per linear layer of d x p: 6 B T d p FLOPs and B T^2 (d + p) where T (d + p) < d p, else
2 B d p.
"""

from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.subjects.methods.clipped import ClippedStep


class FlashBk(ClippedStep):
    """A step of ``BookKeeping``.

    Formal guarantees: the sum before noise has L2 sensitivity ``max_grad_norm`` under adding or
    removing one sample.
    """

    clipping_type = BookKeeping
