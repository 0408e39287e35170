"""Exact per-sample clipping of any model's gradient, without per-sample gradients.

``BookKeeping`` and ``FlashClipping`` clip the gradient of each sample to one bound, in one
backward pass and in two; ``PerLayerClipping`` clips each layer to a bound of its own.
``NoisyOptimizer`` adds the noise.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpprof.clipping.book_keeping import BookKeeping
    from dpprof.clipping.engine import Clipping
    from dpprof.clipping.optimizer import NoisyOptimizer
    from dpprof.clipping.per_layer import PerLayerClipping
    from dpprof.clipping.two_pass import FlashClipping
    from dpprof.spec.registry import UnsupportedError

__all__ = [
    "BookKeeping",
    "Clipping",
    "FlashClipping",
    "NoisyOptimizer",
    "PerLayerClipping",
    "UnsupportedError",
]

_WHERE = {
    "BookKeeping": "dpprof.clipping.book_keeping",
    "Clipping": "dpprof.clipping.engine",
    "FlashClipping": "dpprof.clipping.two_pass",
    "NoisyOptimizer": "dpprof.clipping.optimizer",
    "PerLayerClipping": "dpprof.clipping.per_layer",
    "UnsupportedError": "dpprof.spec.registry",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: one method's code must not load another's."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
