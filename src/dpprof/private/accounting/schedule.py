"""Says how a training draws its samples, and which accountants there are."""

from typing import Literal, NamedTuple

Accountant = Literal["prv", "rdp", "pld", "tightest"]  # Opacus's, dp-accounting's; the least bound


class Schedule(NamedTuple):
    """How many steps draw each sample with which probability."""

    samples: int  # the number of samples in the data
    batch_size: int  # the expected number of samples of a step
    steps: int

    @property
    def sample_rate(self) -> float:
        """The probability with which a step draws a sample."""
        return self.batch_size / self.samples


class Sampling(NamedTuple):
    """How a step draws its samples, as far as epsilon depends on it."""

    rate: float  # the probability with which a step draws each sample that may be drawn in it
    folds: int = 1  # step t draws from samples t, t + folds, ... alone
    largest: int | None = None  # of more drawn samples a random subset stays; None: no limit
    drawn_from: int = 0  # the most samples among which ``largest`` are kept: of a fold, on one rank
    unit: str = "sample"  # what the other fields draw: a ``sample``, or a whole ``user``

    def count_turns(self, steps: int) -> int:
        """Count the most steps of so many, in turn, that may draw one sample."""
        return -(-steps // self.folds)
