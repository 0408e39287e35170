"""Says how often a training draws each sample."""

from typing import Literal, NamedTuple

Accountant = Literal["prv", "rdp"]
"""Opacus's accountants, by their names there."""


class Schedule(NamedTuple):
    """How many steps draw each sample with which probability."""

    samples: int
    """The number of samples in the data."""

    batch_size: int
    """The expected number of samples of a step."""

    steps: int

    @property
    def sample_rate(self) -> float:
        """The probability with which a step draws a sample."""
        return self.batch_size / self.samples
