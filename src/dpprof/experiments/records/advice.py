"""What ``dpprof advise`` says: methods ranked for a target."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from dpprof.experiments.config.quantities import optional
from dpprof.experiments.records.record import Part
from dpprof.experiments.records.terms import Component, OpKind, Phase

Recommendation = Literal[
    "baseline", "first", "close", "slower", "tight", "unranked", "wrong", "does not fit", "failed"
]


class Stretch(NamedTuple):
    """A stretch of predicted steps: seconds of a GPU for a token, or an image."""

    seconds: float
    kernels: Mapping[tuple[Phase, OpKind], float]
    """Seconds of the device by what its kernels do; empty where that is not known."""

    host: float
    """Seconds of the host, which issues them."""

    exchange: float
    """Seconds in which the GPU only waits for other ranks."""


class StepParts(NamedTuple):
    """What a predicted step consists of, so that two can be compared part by part."""

    device: str
    """The devices and the dtype; steps share errors where these are equal."""

    method: str
    samples: int
    """In a batch of one GPU."""

    spread: float
    """Standard deviation of the logarithm of the whole time."""

    of_products: float
    """The same of all matrix products together."""

    own: float
    """Spread of kernels that only this one of two steps runs, over that of all of their kind."""

    of_python: float
    """The same of what the method's own Python takes of the host's time."""

    each: Stretch
    """What runs for each batch whose gradients add up."""

    update: Stretch
    """Noise and optimizer, which run once for all of them."""

    @property
    def seconds(self) -> float:
        """Seconds of a GPU for a token, or an image."""
        return self.each.seconds + self.update.seconds


class Option(Part):
    """One method, with its verdict and the numbers behind it."""

    method: str = Field(description="the method")
    verdict: Recommendation = Field(description="its rank among the methods, or why it has none")
    private: bool = Field(description="whether it is private")
    mechanism: str | None = optional("what makes it private; null: no verdict")
    verified: bool | None = optional("whether its gradient is right; null: unknown")
    largest_batch_size: int | None = optional("largest that is predicted to fit")
    largest_peak_bytes: int | None = optional("predicted peak of that batch")
    smallest_batch_size: int | None = optional("fewest samples that a step takes")
    safe_batch_size: int | None = optional("largest that never releases the cache")
    safe_peak_bytes: int | None = optional("predicted peak of that batch")
    tokens_per_s: float | None = optional("predicted at the safe batch")
    tokens_per_s_low: float | None = optional("lower end of the 90 % interval")
    tokens_per_s_high: float | None = optional("upper end of the 90 % interval")
    sample_s: float | None = optional("predicted seconds of a sample in that batch")
    update_s: float | None = optional(
        "predicted seconds of noise and optimizer, which run once in a step"
    )
    over_first: float | None = optional("its time of a sample over the first method's")
    over_first_low: float | None = optional("lower end of its 90 % interval")
    over_first_high: float | None = optional("upper end")
    over_plain: float | None = optional("the same over standard's")
    over_plain_low: float | None = optional("lower end of its 90 % interval")
    over_plain_high: float | None = optional("upper end")
    ratio_reason: str | None = optional("why a ratio is null")
    tokens_per_s_at_most: float | None = optional("same at every operator's ceiling")
    dp_flop_multiplier: float | None = optional("executed FLOPs over model FLOPs")
    limited_by: str | None = optional("memory, fragmentation or search")
    message: str | None = optional("why it is not advised, or has no batch")
    checkpointing: str | None = optional("how blocks are checkpointed")
    execution: str | None = optional("how kernels are started")
    tokens_per_s_by_checkpointing: dict[str, float | None] | None = optional(
        "predicted for each way that was tried, where several were"
    )
    parts: StepParts | None = optional("what its ratios are computed from", exclude=True)


WITHOUT_COLUMN = {
    *("checkpointing", "execution", "tokens_per_s_by_checkpointing", "parts", "ratio_reason"),
}
"""Fields that no table has as columns: checkpointing and execution are axes there."""


class OnGpus(Part):
    """One method on one number of GPUs, each with the largest safe batch."""

    method: str
    private: bool
    gpus: int
    safe_batch_size: int
    """Samples in the batch of each GPU."""

    tokens_per_s: float
    """The predicted throughput of all GPUs together."""

    tokens_per_s_low: float | None
    """Lower end of the 90 % interval."""

    tokens_per_s_high: float | None
    """Upper end."""

    tokens_per_s_per_gpu: float
    efficiency: float
    """Speed of a GPU over that with ``fewest_gpus``, the fewest that train with the method."""

    fewest_gpus: int
    gpu_hours_per_billion: float
    """GPU hours for a billion tokens."""

    parts: StepParts | None = Field(None, exclude=True)
    """What ratios are computed from."""


class OneMoreSample(Part):
    """What a sample more than the advised batch would cost, and what that batch's peak is of."""

    sample_bytes: int
    """Predicted, from the nearest batches of which a peak is known."""

    phase: Phase
    """Where the peak is."""

    peak_shares: dict[Component, float]
    """The share of each component in the peak, the largest first."""


class Advice(Part):
    """Methods for a model, a sequence length and a target, best first."""

    model: str
    lora: str | None = None
    """The adapters that are trained; None where the model has none."""

    parallel: str | None = None
    """The ranks, as ``fsdp x8``; batches are those of each. None for one process."""

    gpus: int = 1
    """How many there are."""

    seq_len: int
    image_size: int | None = None
    """Height and width of images; None for text. An image counts as one token."""

    dtype: str
    optimizer: str = "adamw"
    checkpointing: str | None = None
    """The way that was asked for; ``best`` where several were tried, and each option has its
    fastest."""

    execution: str = "eager"
    """How kernels are started: ``eager``, or ``graph`` for a CUDA graph; ``default`` where methods
    differ, and each option has its own."""

    head: str = "logits"
    """How the loss is computed: from all ``logits``, ``chunked``, or ``kept``."""

    loop: str = "dpprof"
    """The training loop."""

    noise_strategy: str = "independent"
    """How the noise of steps is correlated, which costs memory."""

    target: str
    budget_bytes: int | None
    options: tuple[Option, ...]
    one_more_sample: OneMoreSample | None = None
    """What a further sample costs with the advised method; None where no method is advised, or its
    peaks are not known."""

    rests_on: dict[str, float] = Field(default_factory=dict)
    """Shares of the device's time by what predicted speeds rest on, for the first method."""

    sure_of_memory: str
    sure_of_time: str
    without_checkpointing: Option | None = Field(None, exclude=True)
    """The advised method without checkpointing, where several ways were tried."""

    whole: "Advice | None" = None
    """The advice for the model without adapters, where that was asked too."""

    @property
    def sides(self) -> "list[Advice]":
        """The advice as asked, and that for the model without adapters, if there is one."""
        return [self, *([] if self.whole is None else [self.whole])]

    @property
    def best(self) -> Option | None:
        """The private method with the highest predicted speed; None where none fits."""
        return next((option for option in self.options if option.verdict == "first"), None)
