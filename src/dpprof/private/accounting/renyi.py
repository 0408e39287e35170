"""Renyi divergences of a Poisson-sampled Gaussian at many orders at once.

The series of Mironov, Talwar and Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian
Mechanism", section 3.3, which Opacus adds up term by term and order by order; that takes most of
the time of its accountants.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_TERMS = 128  # of a series, at a time
_MOST_TERMS = 64 * _TERMS
_NEGLIGIBLE = -30.0  # logarithm of a term, as Opacus ends a series


def make_compute_rdp(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes the same as Opacus's ``compute_rdp``, which is given, but faster.

    Where a sum does not end, or is no number, Opacus's computes it, and raises what it raises.
    """

    def compute_rdp(
        *, q: float, noise_multiplier: float, steps: int, orders: Sequence[float]
    ) -> Any:
        if 0 < q < 1 and noise_multiplier > 0 and np.ndim(orders) == 1:
            alphas = np.asarray(orders, dtype=np.float64)
            logs = _log_moments(q, noise_multiplier, alphas)
            if np.isfinite(logs).all():
                return logs / (alphas - 1) * steps
        return compute(q=q, noise_multiplier=noise_multiplier, steps=steps, orders=orders)

    return compute_rdp


def _log_moments(rate: float, noise: float, alphas: Numbers) -> Numbers:
    """Return the logarithm of A(alpha) for each order; NaN where there is none."""
    special = importlib.import_module("scipy.special")  # slow to import, and seldom needed
    taken, left = math.log(rate), math.log1p(-rate)
    middle = noise**2 * (left - taken) + 0.5
    logs = np.full(alphas.shape, -np.inf)
    signs = np.ones(alphas.shape)
    is_whole = alphas == np.floor(alphas)
    running = np.arange(len(alphas))

    def both_sides(i: Numbers, j: Numbers) -> Numbers:
        """Integrals of a term below and above the middle; all of a whole order's are below."""
        whole = is_whole[running][:, None]
        below = i * taken + j * left + (i * i - i) / (2 * noise**2)
        above = j * taken + i * left + (j * j - j) / (2 * noise**2)
        cut = special.log_ndtr((middle - i) / noise), special.log_ndtr((j - middle) / noise)
        return np.where(whole, below, np.logaddexp(below + cut[0], above + cut[1]))

    with np.errstate(all="ignore"):
        for begin in range(0, _MOST_TERMS, _TERMS):
            i = np.arange(begin, begin + _TERMS, dtype=np.float64)[None, :]
            choices = special.binom(alphas[running, None], i)
            choices[is_whole[running, None] & (i > alphas[running, None])] = 0
            terms = np.log(np.abs(choices)) + both_sides(i, alphas[running, None] - i)
            with_before = np.column_stack([logs[running], terms])
            weights = np.column_stack([signs[running], np.sign(choices)])
            logs[running], signs[running] = special.logsumexp(
                with_before, axis=1, b=weights, return_sign=True
            )
            running = running[terms[:, -1] >= _NEGLIGIBLE]
            if not len(running):
                break
    logs[running] = np.nan
    logs[signs <= 0] = np.nan
    return logs
