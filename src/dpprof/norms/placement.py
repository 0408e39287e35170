"""Where a tensor is, as far as that decides how it is worked on.

Whoever decides by the device of a tensor asks here, so that what predicts a GPU's step without
one has a single switch, ``as_if_on_cuda``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class _Simulated(NamedTuple):
    """In which respects every tensor counts as one on a CUDA device."""

    autocast: bool = False
    products: bool = False
    kernels: bool = False


_simulated = [_Simulated()]
"""Of the contexts that are open, innermost last; it alone counts."""


@contextmanager
def as_if_on_cuda(
    *, autocast: bool = True, products: bool = True, kernels: bool = True
) -> Iterator[None]:
    """Take every tensor within for one on a CUDA device, wherever it is.

    Args:
        autocast: Under autocast, normalisations compute in float32.
        products: Products and sums take as few launches as tensor cores allow.
        kernels: The Triton kernels for norms run, whether or not they could be compiled here.
    """
    before = len(_simulated)
    _simulated.append(_Simulated(autocast, products, kernels))
    try:
        yield
    finally:
        del _simulated[before:]


def is_cuda(x: Tensor) -> bool:
    """Tell whether a tensor is where launches are dear, and tensor cores multiply 16 bits."""
    return x.is_cuda or _simulated[-1].products


def follows_cuda_autocast(x: Tensor) -> bool:
    """Tell whether autocast computes a tensor's normalisation in float32."""
    return x.is_cuda or _simulated[-1].autocast


def simulates_kernels() -> bool:
    """Tell whether kernels are taken to run on any tensor."""
    return _simulated[-1].kernels
