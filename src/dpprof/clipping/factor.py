"""The clipping factor."""

import torch
from torch import Tensor


def clip_factor(norm: Tensor, max_grad_norm: float) -> Tensor:
    """Compute the factor that scales a gradient of this norm to at most ``max_grad_norm``.

    ``min(1, C / (norm + 1e-6))``, elementwise; the constant is Opacus's, so that
    results can be compared to the last digits.
    """
    return torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)
