"""Finds where the spent epsilon meets a budget, with few calls of a slow accountant."""

import math
from collections.abc import Callable

MOST, LEAST = 1e6, 0.01  # the bounds of the values that are tried; Opacus has the first one too
_POWER = -2.5  # about how epsilon depends on the noise multiplier: from -1 (much noise) to -3.5

_STEP, _MAX_CALLS = 8.0, 100

FAILURES = (ArithmeticError, IndexError, MemoryError, RuntimeError, ValueError)
"""What accountants and searches raise, for example where floating point does not suffice."""


class BeyondReachError(ValueError):
    """No value spends as much as that; the message says what the last one spends."""


def find_least(
    spent: Callable[[float], float],
    target: float,
    tolerance: float,
    guess: float,
    most: float = MOST,
) -> float:
    """Find a value that spends at most the target, and less than a tolerance below it.

    ``spent`` returns the epsilon of a value, which falls while the value grows: nearly as a
    power between two values. ``BeyondReachError``: not even ``most`` spends so little, or the
    smallest so much.
    """
    aim, low, high = target - tolerance / 2, 0.0, math.inf
    value, power, before = min(guess, most), _POWER, (0.0, 0.0)
    for call in range(_MAX_CALLS):
        epsilon = spent(value)
        if epsilon <= target:
            high = value
            if target - epsilon <= tolerance:
                return value
            if value < LEAST:
                raise BeyondReachError(f"{value:.3g} spends only {epsilon:.3g}")
        else:
            low = value
            if value >= most:
                raise BeyondReachError(f"{value:,.6g} still spends {epsilon:.3g}")
        power = _fit_power(before, (value, epsilon)) or power
        before = value, epsilon
        near = _step(value, epsilon, aim, power)
        if math.isinf(high):
            value = min(near, most) if near > value else most
        elif low < near < high and call % 4 < 3:  # noqa: PLR2004 (else it may creep)
            value = near
        else:
            value = math.sqrt(low * high) if low else high / 2
        if value in (low, high):
            return high  # neighbouring numbers
    raise BeyondReachError("the search did not end")


def _step(value: float, epsilon: float, aim: float, power: float) -> float:
    """Return where a power through one point meets the aim, not too far from the point."""
    if not 0 < epsilon < math.inf:
        return value * _STEP if epsilon else value / _STEP
    return value * min(max(math.pow(aim / epsilon, 1 / power), 1 / _STEP), _STEP)


def _fit_power(first: tuple[float, float], second: tuple[float, float]) -> float | None:
    """Return the power through two points; None where they do not fall."""
    if min(*first, *second) <= 0 or not all(map(math.isfinite, (*first, *second))):
        return None
    along, spent = math.log(first[0] / second[0]), math.log(first[1] / second[1])
    return spent / along if along and spent / along < -0.1 else None  # noqa: PLR2004 (flat)
