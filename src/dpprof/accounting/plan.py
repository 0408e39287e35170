"""What a privacy budget asks for: batches, steps and noise, for one epsilon and for others."""

from pydantic import BaseModel, ConfigDict, Field

from dpprof.accounting.schedule import NoiseOfBatch


class AtEpsilon(BaseModel):
    """A training with as many steps as planned, and as little noise in each, at some epsilon."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    reason: str | None = Field(None, description="why a figure is null")


class NoisePlan(BaseModel):
    """The noise of a training for a privacy budget."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_sample: float
    batches: list[NoiseOfBatch] = Field(description="over batch sizes, for the first epsilon")
    batch_size: int = Field(description="the one that is used")
    epsilons: list[AtEpsilon] = Field(description="the first is what is planned for")

    @property
    def planned(self) -> NoiseOfBatch:
        """The noise with the batch that is used."""
        return next(one for one in self.batches if one.batch_size == self.batch_size)
