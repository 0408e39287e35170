"""Answers questions about a tensor's device; ``as_if_on_cuda`` simulates CUDA for estimates."""

from contextlib import AbstractContextManager
from types import SimpleNamespace

from torch import Tensor

from dpprof.private.substitutes import substitute

_SIMULATION = SimpleNamespace(is_on=False)


def as_if_on_cuda() -> AbstractContextManager[None]:
    """Treat every tensor as on CUDA inside the context, and run Triton's kernels, too."""
    return substitute(_SIMULATION, "is_on", value=True)


def is_cuda(x: Tensor) -> bool:
    """Tell whether a tensor is on CUDA.

    There kernel launches are expensive, tensor cores multiply 16-bit numbers, and autocast
    normalises in float32.
    """
    return x.is_cuda or is_simulated()


def is_simulated() -> bool:
    """Tell whether every tensor counts as a CUDA tensor."""
    return bool(_SIMULATION.is_on)
