"""How much noise a privacy budget asks for by each mechanism: how the noise of steps correlates."""

from pydantic import BaseModel, Field

from dpprof.experiments.accounting.plan import AtEpsilon, NoiseOfBatch
from dpprof.experiments.config.quantities import optional

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
