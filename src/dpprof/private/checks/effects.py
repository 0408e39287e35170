"""Judges the effects of a step: what it changed, its noise, and which errors are rounding."""

import math
from collections.abc import Iterable

import torch
from scipy.stats import chi2
from torch import Tensor

from dpprof.private.checks.loop import Gradients, Loop, StepEffects
from dpprof.private.norms.complex_numbers import as_real
from dpprof.private.samples.company import WrongTrainingError

_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}  # the largest error by rounding, by dtype

LIMIT_OF_16_BITS = 0.05

_FALSE_ALARM = 1e-12  # the probability that right noise is called wrong, for each parameter


def refuse_changes(loop: Loop, taken: StepEffects) -> None:
    """Refuse a step that changed a frozen parameter, or left a trained one that has a gradient."""
    for parameter, name in loop.names.items():
        if not parameter.requires_grad and parameter in taken.moved:
            raise WrongTrainingError(f"{name} is frozen, and a step changes it")
    rates = _read_rates(loop)
    for parameter in loop.trained:
        size = rates[parameter] * float(taken.gradients[parameter].abs().max())
        least = 4 * torch.finfo(parameter.dtype).eps * float(parameter.detach().abs().max())
        if size > least and parameter not in taken.moved:
            raise WrongTrainingError(f"{loop.names[parameter]}: a step does not change it")


def find_resting(loop: Loop) -> str | None:
    """Return the name of the last trained parameter whose learning rate is 0, if there is one."""
    rates = _read_rates(loop)
    resting = [loop.names[parameter] for parameter in loop.trained if rates[parameter] == 0]
    return resting[-1] if resting else None


def _read_rates(loop: Loop) -> dict[torch.nn.Parameter, float]:
    groups = loop.optimizer.param_groups
    return {parameter: float(group["lr"]) for group in groups for parameter in group["params"]}


def compare_noise(loop: Loop, silent: Gradients, first: Gradients, second: Gradients) -> int:
    """Compare the noise of each parameter, and of all, with its scale; return how many elements.

    ``silent`` are gradients without noise, ``first`` and ``second`` of steps with noise.
    ``WrongTrainingError``: a parameter gets no noise, the same each time, or of another scale.
    """
    scale, drawn, squares, most_rounding = loop.settings.noise, 0, 0.0, 0.0
    for parameter in loop.trained:
        name, base = loop.names[parameter], silent[parameter]
        noise = [as_real(noisy[parameter] - base).double() for noisy in (first, second)]
        if not noise[0].any():
            raise WrongTrainingError(f"{name} gets no noise")
        if torch.equal(first[parameter], second[parameter]):
            raise WrongTrainingError(f"{name} gets the same noise in every step")
        count, square = 2 * noise[0].numel(), sum(float(own.square().sum()) for own in noise)
        rounding = 2 * torch.finfo(parameter.dtype).eps * (float(base.abs().max()) + scale)
        _compare_scale(name, count, square, scale, rounding)
        drawn, squares = drawn + count, squares + square
        most_rounding = max(most_rounding, rounding)
    _compare_scale("all parameters", drawn, squares, scale, most_rounding)
    return drawn // 2


def _compare_scale(name: str, count: int, square: float, scale: float, rounding: float) -> None:
    """Compare a sum of squares of Gaussian numbers with their scale, by a chi-squared test."""
    low, high = chi2.ppf([_FALSE_ALARM / 2, 1 - _FALSE_ALARM / 2], count) / count
    deviation = math.sqrt(square / count)
    least, most = (math.sqrt(ratio) * scale for ratio in (low, high))
    if not least - rounding <= deviation <= most + rounding:
        raise WrongTrainingError(
            f"{name}: the noise has a standard deviation of {deviation:.4g}, and noise multiplier "
            f"times bound over the expected batch size is {scale:.4g}"
        )


def limit_of(losses: Tensor, trained: Iterable[Tensor], *, in_16_bits: bool) -> float:
    """Return the largest error that rounding may cause."""
    dtypes = [losses.dtype, *(p.dtype.to_real() for p in trained)]
    limit = max(_LIMITS.get(dtype, LIMIT_OF_16_BITS) for dtype in dtypes)
    return LIMIT_OF_16_BITS if in_16_bits else limit
