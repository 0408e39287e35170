"""A privacy budget: what a training may spend, on which data and how many tokens."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator

from dpprof.experiments.config.quantities import (
    NotNegative,
    Positive,
    Whole,
    one_or_many,
    optional,
    refuse_bool,
)
from dpprof.experiments.config.validation import refuse
from dpprof.private.accounting.schedule import Accountant

Share = Annotated[float, Field(gt=0, lt=1), BeforeValidator(refuse_bool)]


class Privacy(BaseModel, frozen=True, extra="forbid"):
    """A privacy budget, and the training that spends it."""

    samples: Whole = Field(description="samples (sequences) in the data")
    tokens: Whole = Field(description="tokens to train on, over all epochs")
    epsilon: one_or_many(Positive) = Field(  # type: ignore[valid-type]
        max_length=32,
        description="the epsilon to spend; of several the first is the one to plan for",
    )
    delta: Share = optional(
        "the delta to spend, less than 1 / samples; null: a tenth of 1 / samples",
        validate_default=True,
    )
    batch_size: Whole | None = optional(
        "expected samples of a step, over all its micro-batches; null: chosen by noise"
    )
    least_steps: Whole = Field(1000, description="a batch that is chosen leaves at least so many")
    accountant: Accountant = Field(
        "tightest",
        description="Opacus's prv (tight, slow for 10,000 steps and more) or rdp (fast, asks for a "
        "little more noise), pld (tight and fast; needs dp-accounting), or tightest: the one of "
        "these that asks for the least noise, of those that are installed",
    )
    price_per_hour: NotNegative | None = optional("price of a GPU for an hour, in any currency")

    @field_validator("delta", mode="before")
    @classmethod
    def _settle_delta(cls, value: Any, info: ValidationInfo) -> Any:
        """Take a tenth of one over the samples where none is given."""
        if value is not None:
            return value
        return 0.1 / info.data["samples"] if "samples" in info.data else 0.1  # its error is told

    @field_validator("batch_size")
    @classmethod
    def _refuse_more_than_all(cls, value: int | None, info: ValidationInfo) -> int | None:
        samples = info.data.get("samples")
        if value is not None and samples is not None and value > samples:
            raise ValueError(f"it must be at most the samples of the data, {samples:,}")
        return value

    @property
    def warnings(self) -> list[str]:
        """What is allowed, and yet promises less than people mean."""
        if self.delta * self.samples <= 1:
            return []
        warning = (
            f"delta {self.delta:g} is above 1 / samples, {1 / self.samples:.2g}: publishing each "
            "sample with that probability would satisfy it, and would publish "
            f"{self.delta * self.samples:,.3g} of them on average"
        )
        return [warning]

    def refuse_few_tokens(self, tokens_per_sample: float, key: str) -> None:
        """Refuse tokens that do not fill one batch, or the least number of steps.

        ``tokens_per_sample`` is without padding; ``key`` is what the user calls ``tokens``.

        Raises:
            InputError: They do not.
        """
        least, what = self.batch_size, f"a batch of {self.batch_size or 0:,}"
        if least is None:
            least, what = self.least_steps, f"least_steps, {self.least_steps:,} batches of one"
        if self.tokens < least * tokens_per_sample:
            needed = f"{least * tokens_per_sample:,.0f} tokens for {what}"
            raise refuse(key, self.tokens, f"it must be at least {needed}")
