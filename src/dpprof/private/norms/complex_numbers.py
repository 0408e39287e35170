"""Complex numbers as pairs of real ones: a complex parameter is two real ones for each element.

Norms are over both parts, and each part gets noise of its own. So all that leads from the gradient
of a complex parameter to its noised sum is real: (..., n) complex numbers become (..., 2n) real
ones, each real part before its imaginary part.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

import torch
from torch import Tensor


def as_real(x: Tensor) -> Tensor:
    """Return complex numbers as pairs on another last axis, in their memory; real ones as given."""
    return torch.view_as_real(x) if x.is_complex() else x


def interleave(x: Tensor) -> Tensor:
    """Return complex numbers as twice as many real ones on the last axis; real ones as given.

    The first axis stays: (B,) complex numbers become (B, 2) real ones, and real ones (B, 1).
    """
    if x.dim() == 1:
        x = x[:, None]
    real = as_real(x.resolve_conj())
    return real.flatten(-2) if x.is_complex() else real


def as_parameter(real: Tensor, parameter: Tensor) -> Tensor:
    """Return the sum of a parameter's gradients, which is real, in the parameter's shape."""
    if not parameter.is_complex():
        return real.view(parameter.shape)
    return torch.view_as_complex(real.view(*parameter.shape, 2))


def split_product(left_BTm: Tensor, right_BTn: Tensor) -> tuple[Tensor, Tensor]:
    """Return real factors (B, 2T, m) and (B, 2T, 2n) of ``left^T right`` of each sample.

    ``a b`` is ``Re a`` times ``b`` and ``Im a`` times ``i b``: each token becomes two.
    """
    parts = torch.cat([left_BTm.real, left_BTm.imag], dim=1)
    return parts, interleave(torch.cat([right_BTn, 1j * right_BTn], dim=1))
