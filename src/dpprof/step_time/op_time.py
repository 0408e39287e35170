"""The predicted time of an operator: a median, how far off it may be, and what it rests on."""

import math
from typing import NamedTuple

from dpprof.records.terms import Basis

Z_90 = 1.645
"""Standard deviations on each side of the median in a 90 % interval of a normal distribution."""


class UnknownTimeError(LookupError):
    """A time cannot be predicted; the message says why."""


class OpTime(NamedTuple):
    """The predicted seconds of one call of an operator."""

    seconds: float
    """The median."""

    spread: float
    """Standard deviation of the logarithm."""

    basis: Basis

    @property
    def low(self) -> float:
        """The lower end of the 90 % interval."""
        return self.seconds * math.exp(-Z_90 * self.spread)

    @property
    def high(self) -> float:
        """The upper end of the 90 % interval."""
        return self.seconds * math.exp(Z_90 * self.spread)
