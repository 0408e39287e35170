"""Batch, steps and noise that a privacy budget asks for, on a fixed number of tokens."""

import math
from collections.abc import Sequence

from pydantic import BaseModel, Field

from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.quantities import optional
from dpprof.private.accounting.schedule import Schedule

ENOUGH = 1.05
"""A smaller batch is chosen if it has no more than this many times the noise of the largest."""

_AROUND = (-2, -1, 0, 1, 2)  # which doublings of a batch are shown beside it


def schedule(privacy: Privacy, tokens_per_sample: float, batch_size: int) -> Schedule:
    """Return the training on all tokens with batches of a size; steps are rounded up."""
    steps = math.ceil(privacy.tokens / (batch_size * tokens_per_sample))
    return Schedule(privacy.samples, batch_size, steps)


class NoiseOfBatch(BaseModel, frozen=True, extra="forbid"):
    """What a budget asks for with batches of a size, on a fixed number of tokens."""

    batch_size: int = Field(description="expected samples of a step")
    sample_rate: float = Field(description="probability with which a step draws a sample")
    steps: int = Field(description="steps of the training")
    noise_multiplier: float | None = Field(
        description="standard deviation of the noise on the summed gradient, over C"
    )
    step_noise: float | None = Field(
        description="noise multiplier over batch size: standard deviation of the noise on a step's "
        "averaged gradient, over C"
    )
    training_noise: float | None = Field(
        description="the same of the average over all steps: step_noise over the root of steps"
    )
    reason: str | None = optional("why there is no noise multiplier")
    accountant: str | None = optional("whose upper bound of epsilon the noise keeps to")


def describe_noise(
    of: Schedule,
    noise_multiplier: float | None,
    reason: str | None,
    accountant: str | None = None,
) -> NoiseOfBatch:
    """Return the noise of a step and of all steps together."""
    step_noise = None if noise_multiplier is None else noise_multiplier / of.batch_size
    return NoiseOfBatch(
        batch_size=of.batch_size,
        sample_rate=of.sample_rate,
        steps=of.steps,
        noise_multiplier=noise_multiplier,
        step_noise=step_noise,
        training_noise=None if step_noise is None else step_noise / math.sqrt(of.steps),
        reason=reason,
        accountant=accountant,
    )


def largest_batch(privacy: Privacy, tokens_per_sample: float) -> int:
    """Return the largest power of two, of all samples at most, that leaves the least steps."""
    most = min(privacy.tokens / (privacy.least_steps * tokens_per_sample), privacy.samples)
    return 1 << math.floor(math.log2(most))


def batches_around(batch_size: int, samples: int) -> list[int]:
    """Return a batch size, and its halves and doubles that the data allow."""
    sizes = [batch_size * 2**power for power in _AROUND]
    return [int(size) for size in sizes if size == int(size) and 1 <= size <= samples]


def choose_batch(noises: Sequence[NoiseOfBatch], largest: int) -> int:
    """Return the smallest batch with nearly as little noise in the training as the largest.

    On a fixed number of tokens the noise of a training falls as batches grow, ever more slowly (Li
    et al. 2022, https://arxiv.org/abs/2110.05679): there are fewer steps, and each sample is drawn
    equally often.
    """
    allowed = {
        noise.batch_size: noise.training_noise
        for noise in noises
        if noise.batch_size <= largest and noise.training_noise
    }
    if not allowed:
        return largest
    enough = ENOUGH * min(allowed.values())
    return min(batch_size for batch_size, noise in allowed.items() if noise <= enough)


class AtEpsilon(BaseModel, frozen=True, extra="forbid"):
    """A training with the planned steps and noise at some epsilon."""

    epsilon: float
    same_batch_noise_multiplier: float | None = Field(
        description="noise multiplier with the planned batch and tokens: time stays, noise changes"
    )
    batch_size: int | None = Field(
        description="the least batch with which a step's averaged gradient has the planned noise; "
        "null where no batch has"
    )
    noise_multiplier: float | None = Field(description="noise multiplier with that batch")
    tokens: float | None = Field(description="that the steps of that batch take")
    reason: str | None = optional("why a figure is null")


class NoisePlan(BaseModel, frozen=True, extra="forbid"):
    """The noise of a training for a privacy budget."""

    tokens_per_sample: float
    batches: list[NoiseOfBatch] = Field(description="over batch sizes, for the first epsilon")
    batch_size: int = Field(description="the one that is used")
    epsilons: list[AtEpsilon] = Field(description="the first is the planned one")

    @property
    def planned(self) -> NoiseOfBatch:
        """The noise with the batch that is used."""
        return next(noise for noise in self.batches if noise.batch_size == self.batch_size)


MOMENTUM = 0.9


class NoiseOfMechanism(BaseModel, frozen=True, extra="forbid"):
    """The noise of one mechanism in as many steps as are planned, and the batch that equals it.

    Noise is relative to the bound C, of averaged gradients, as root mean square over all steps.
    """

    mechanism: str = Field(description="independent, or banded-8 or bisr-8, with so many bands")
    folds: int = Field(
        1, description="steps draw in turn from so many folds of the data; 1: from all of it"
    )
    noise_multiplier: float | None = optional("with the planned batch")
    accountant: str | None = optional("whose upper bound of epsilon the noise keeps to")
    step_noise: float | None = optional("of a step, with the planned batch")
    sum_noise: float | None = optional(
        "of the sum over the steps so far, with the planned batch: of SGD's parameters at a "
        "learning rate of 1"
    )
    momentum_noise: float | None = optional(f"the same of SGD with a momentum of {MOMENTUM}")
    batch_size: int | None = optional(
        "the least batch with which the sum, or that with momentum where the optimizer is "
        "sgd-momentum, has at most the noise that it has with independent noise and the planned "
        "batch; null where none has"
    )
    batch_noise_multiplier: float | None = optional("noise multiplier with that batch")
    reason: str | None = optional("why a figure is null")

    def at_epsilon(self, epsilon: float) -> AtEpsilon:
        """Return the training with the batch whose sum has as much noise as is planned."""
        return AtEpsilon(
            epsilon=epsilon,
            same_batch_noise_multiplier=self.noise_multiplier,
            batch_size=self.batch_size,
            noise_multiplier=self.batch_noise_multiplier,
            tokens=None,
            reason=self.reason,
        )


def momentum_of(optimizer: str) -> float:
    """Return the momentum of the sum whose noise is to be equal."""
    return MOMENTUM if optimizer == "sgd-momentum" else 0.0


def bands_of(mechanism: str) -> int:
    """Return the number of bands: one of independent noise."""
    return int(mechanism.partition("-")[2] or 1)


def explain_impossible(mechanism: str, planned: NoiseOfBatch, samples: int) -> str | None:
    """Say why no data of so many samples have the folds for a mechanism; None where they have."""
    bands, size = bands_of(mechanism), planned.batch_size
    if bands <= min(planned.steps, samples // size):
        return None
    few = f"{bands} folds of {samples / bands:,.6g} samples are too few"
    return f"{few} for batches of {size:,}, or {bands} bands too many for {planned.steps:,} steps"
