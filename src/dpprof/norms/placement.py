"""Answers questions about a tensor's device; ``as_if_on_cuda`` simulates CUDA for estimates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class _Simulated(NamedTuple):
    """In which respects every tensor counts as a CUDA tensor."""

    autocast: bool = False
    products: bool = False
    kernels: bool = False


_simulated = [_Simulated()]
"""One for each open context; the last one counts."""


@contextmanager
def as_if_on_cuda(
    *, autocast: bool = True, products: bool = True, kernels: bool = True
) -> Iterator[None]:
    """Treat every tensor as a CUDA tensor inside the context.

    Args:
        autocast: Under autocast, normalisations compute in float32.
        products: Products and sums take as few launches as tensor cores allow.
        kernels: The Triton kernels for norms run, even if they cannot be compiled here.
    """
    before = len(_simulated)
    _simulated.append(_Simulated(autocast, products, kernels))
    try:
        yield
    finally:
        del _simulated[before:]


def is_cuda(x: Tensor) -> bool:
    """Tell whether kernel launches are expensive, and tensor cores multiply 16-bit numbers."""
    return x.is_cuda or _simulated[-1].products


def follows_cuda_autocast(x: Tensor) -> bool:
    """Tell whether autocast normalises a tensor in float32."""
    return x.is_cuda or _simulated[-1].autocast


def simulates_kernels() -> bool:
    """Tell whether kernels are assumed to run on any tensor."""
    return _simulated[-1].kernels
