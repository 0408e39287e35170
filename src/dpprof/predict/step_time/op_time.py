"""The predicted time of an operator: a median, how far off it may be, and what it rests on."""

from typing import NamedTuple

from dpprof.experiments.records.terms import Basis

Z_90 = 1.645
"""Standard deviations on each side of the median in a 90 % interval of a normal distribution."""


class UnknownTimeError(LookupError):
    """A time cannot be predicted; the message says why."""


class OpTime(NamedTuple):
    """The predicted seconds of one call of an operator."""

    seconds: float  # the median
    spread: float  # standard deviation of the logarithm
    basis: Basis
