"""The clipping factor: of flat, of normalised and of PSAC.

Normalised clipping, ANOTHER MECHANISM than flat clipping, multiplies each sample's gradient by
C / (norm + gamma), whether it is long or short. So C only scales the step, as the learning rate
does, and need not be tuned; the stability gamma > 0 lets short gradients stay shorter than others.
Source: Bu et al. 2022, "Automatic Clipping: Differentially Private Deep Learning Made Easier and
Stronger", arXiv 2206.07136, AUTO-S, whose factor is 1 / (norm + gamma). Each sample contributes
C norm / (norm + gamma), which is less than C: the sensitivity, and so the noise and the accounting,
are those of flat clipping.

PSAC multiplies by C / (norm + r / (norm + r)), for gradients that become short: they
weigh about as much as they are, and not 1 / gamma times. Source: Xia et al. 2023, "Differentially
Private Learning with Per-Sample Adaptive Clipping", arXiv 2212.00328, DP-PSAC. Each sample
contributes less than C, as with normalised clipping, and all else is as there.

Rounding is that of flat clipping (``norms.rounding``): a norm that is told too small by a fraction
lets its sample exceed C by that fraction at most. A norm may also be told as zero, where squares
underflow: the gradient is then shorter than about 1e-6 2^-9. A gamma of ``LEAST_STABILITY`` makes
less than 2^-8 C of it.

A factor below ``LEAST_FACTOR`` would make numbers of which float32 has few digits, or none. Such a
sample is computed by itself in float64 (``contributions.alone``), so C may be any number from
``LEAST_BOUND`` to ``LARGEST_BOUND``, at which 2^16 samples, and noise, stay in the range of
float32.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dpprof.private.errors import refuse_no_number
from dpprof.private.norms.rounding import LEAST_NORM

STABILITIES = {"flat": None, "normalised": 0.01, "psac": 0.1}  # by clipping, the default

LEAST_STABILITY = 2.0**-10

LEAST_FACTOR = 2.0**-80

LEAST_BOUND, LARGEST_BOUND = 1e-38, 1e33
_LARGEST_FACTOR = 2.0**40  # larger factors of short gradients could overflow in the sum


def clip_factor(
    norm: Tensor,
    max_grad_norm: float,
    stability: float | None = None,
    loss_scale: float = 1.0,
    *,
    psac: bool = False,
) -> Tensor:
    """Compute the factor that scales a gradient of this norm to at most ``max_grad_norm``.

    Flat clipping, ``stability=None``: ``min(1, C / (norm + 1e-6))``, elementwise; the constant is
    Opacus's, so that results can be compared to the last digits. Normalised clipping:
    ``C / (norm + stability)``; ``psac``: ``C / (norm + stability / (norm + stability))``. What
    is scaled may be ``loss_scale`` times the gradient.
    """
    if stability is not None:
        added = stability / (norm + stability) if psac else stability
        factor = max_grad_norm / (norm + added)
    else:
        factor = torch.clamp(max_grad_norm / (norm + LEAST_NORM), max=1.0)
    if loss_scale != 1:
        factor = factor / loss_scale
    # A smaller number may have been rounded up.
    return factor.masked_fill(factor < torch.finfo(factor.dtype).tiny, 0)


def find_factor(clipping: str, stability: float | None) -> dict[str, Any]:
    """Return the settings of ``Clipping`` for a clipping of ``STABILITIES`` (``ValueError``)."""
    if clipping not in STABILITIES:
        raise ValueError(f"clipping must be one of {', '.join(STABILITIES)}, and is {clipping!r}")
    if clipping == "flat" and stability is not None:
        raise ValueError(
            "stability is of clipping='normalised' and 'psac'; flat clipping takes none"
        )
    usual = STABILITIES[clipping]
    return {"stability": usual if stability is None else stability, "psac": clipping == "psac"}


def find_least_norm(max_grad_norm: float, stability: float | None, *, psac: bool) -> float:
    """Return C over the largest factor: errors of norms below it count as those of this norm."""
    if stability is None or not psac:
        return stability or max_grad_norm
    return 1.0 if stability >= 1 else 2 * math.sqrt(stability) - stability


def verify_bound(max_grad_norm: float, stability: float | None, *, psac: bool = False) -> None:
    """Verify that a bound is positive and finite, and no stability too small (``ValueError``)."""
    refuse_no_number("max_grad_norm", max_grad_norm)
    if not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be positive and finite, and is {max_grad_norm}")
    if not LEAST_BOUND <= max_grad_norm <= LARGEST_BOUND:
        raise ValueError(
            f"max_grad_norm must be from {LEAST_BOUND:g} to {LARGEST_BOUND:g}, with which sums of "
            f"{2**16:,} samples stay in float32, and is {max_grad_norm}; scale the losses, and the "
            "learning rate by the inverse"
        )
    if stability is None:
        if psac:
            raise ValueError("psac clipping needs a stability, its r, such as 0.1")
        return
    least = max(LEAST_STABILITY, max_grad_norm / _LARGEST_FACTOR)
    is_positive = math.isfinite(stability) and stability > 0
    if not (is_positive and find_least_norm(0.0, stability, psac=psac) >= least):
        raise ValueError(
            f"stability must be finite and at least {least:g} at max_grad_norm {max_grad_norm:g}, "
            f"and is {stability}: norms of shorter gradients may be told as zero"
        )
