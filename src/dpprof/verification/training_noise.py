"""Tests whether noise that a user's optimizer is given has the scale that it should have."""

import math

import torch
from scipy.stats import chi2

from dpprof.verification.training_loop import Gradients, Loop, WrongTrainingError

_FALSE_ALARM = 1e-12
"""The probability that right noise is called wrong, for each parameter."""


def compare_noise(loop: Loop, silent: Gradients, first: Gradients, second: Gradients) -> int:
    """Compare the variance of each parameter's noise with its scale, by a chi-squared test.

    Args:
        loop: The loop, with noise.
        silent: The gradients that its optimizer is given without noise.
        first: The same with noise.
        second: The same once more.

    Returns:
        How many elements of noise were seen.
    """
    drawn = 0
    for parameter in loop.trained:
        name, zero = loop.names[parameter], torch.zeros_like(parameter)
        base = silent.get(parameter, zero)
        noise = (first.get(parameter, zero) - base).double()
        if not noise.any():
            raise WrongTrainingError(f"{name} gets no noise")
        if torch.equal(first.get(parameter, zero), second.get(parameter, zero)):
            raise WrongTrainingError(f"{name} gets the same noise in every step")
        count = noise.numel()
        low, high = chi2.ppf([_FALSE_ALARM / 2, 1 - _FALSE_ALARM / 2], count) / count
        rounding = 2 * torch.finfo(parameter.dtype).eps * (float(base.abs().max()) + loop.noise)
        found = math.sqrt(float(noise.square().mean()))
        least, most = (math.sqrt(one) * loop.noise for one in (low, high))
        if not least - rounding <= found <= most + rounding:
            raise WrongTrainingError(
                f"{name}: the noise has a standard deviation of {found:.4g}, and noise multiplier "
                f"times bound over the expected batch size is {loop.noise:.4g}"
            )
        drawn += count
    return drawn
