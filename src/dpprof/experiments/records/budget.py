"""What ``dpprof budget`` says: the price of a privacy budget with each method."""

from typing import Literal

from pydantic import Field

from dpprof.experiments.accounting.plan import NoiseOfMechanism, NoisePlan
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.quantities import optional
from dpprof.experiments.records.advice import StepParts
from dpprof.experiments.records.record import Part


class MethodCost(Part):
    """What a training costs with one method at one epsilon."""

    method: str = Field(description="the method")
    epsilon: float | None = Field(description="null for a method that is not private")
    private: bool = Field(description="whether it is private")
    mechanism: str | None = optional("what makes the method private; null: it has no verdict")
    verified: bool | None = optional(
        "whether its gradient equals the reference's; null: not verified"
    )
    batch_size: int | None = optional("expected samples of a step")
    steps: int | None = optional("steps of the training")
    noise_multiplier: float | None = optional("standard deviation of the noise over C")
    same_batch_noise_multiplier: float | None = optional(
        "noise multiplier with the planned batch and tokens, which take the hours of "
        "the first epsilon"
    )
    micro_batch_size: int | None = optional(
        "samples that are on the GPU at a time: equal parts of what safely fits"
    )
    accumulation_steps: int | None = optional("micro-batches of an expected batch")
    step_s: float | None = optional(
        "predicted seconds of a step of an expected batch; noise and optimizer run once in it"
    )
    gpus: int = Field(1, description="GPUs that train the model together")
    gpu_hours: float | None = optional("all steps, predicted: hours of one GPU, or of all together")
    gpu_hours_low: float | None = optional("lower end of the 90 % interval")
    gpu_hours_high: float | None = optional("upper end of the 90 % interval")
    price: float | None = optional("of these hours")
    most_kwh: float | None = optional(
        "energy of these hours at the most that the board draws, by its data sheet"
    )
    hours_ratio: float | None = optional(
        "these hours over those of standard with the planned batch"
    )
    hours_ratio_low: float | None = optional("lower end of its 90 % interval")
    hours_ratio_high: float | None = optional("upper end")
    over_cheapest: float | None = optional("these hours over those of first")
    over_cheapest_low: float | None = optional("lower end of its 90 % interval")
    over_cheapest_high: float | None = optional("upper end")
    cost_verdict: Literal["first", "close", "slower"] | None = optional(
        "first takes the fewest hours at its epsilon; close: no difference is predicted"
    )
    message: str | None = optional("why a figure is null, or needs care")
    parts: StepParts | None = optional("what its ratios are computed from", exclude=True)


class _Priced(Part):
    """A privacy budget on a target."""

    model: str
    seq_len: int
    image_size: int | None = None
    dtype: str
    optimizer: str = "adamw"
    target: str
    privacy: Privacy
    warnings: list[str] = Field(description="what the budget promises less than people mean")
    noise: NoisePlan
    rests_on: dict[str, float] = Field(
        default_factory=dict,
        description="shares of the device's time by what predicted speeds rest on",
    )


class Budget(_Priced):
    """The price of a privacy budget on a target, fastest method first."""

    lora: str | None
    execution: str = Field(
        "eager", description="how kernels of the fastest private method are started"
    )
    methods: list[MethodCost]
    sure_of_memory: str
    sure_of_time: str


class MechanismCost(NoiseOfMechanism):
    """What a training costs with one mechanism whose noise is as independent noise's in the sum."""

    buffers_bytes: int | None = optional("past noise on each GPU")
    safe_batch_size: int | None = optional("samples that safely fit on a GPU")
    micro_batch_size: int | None = optional("samples that are on the GPU at a time")
    same_batch_gpu_hours: float | None = optional("of all steps, with the planned batch")
    gpu_hours: float | None = optional("of all steps, with ``batch_size``")
    gpu_hours_low: float | None = optional("lower end of the 90 % interval")
    gpu_hours_high: float | None = optional("upper end of the 90 % interval")
    price: float | None = optional("of ``gpu_hours``")
    hours_ratio: float | None = optional("gpu_hours over those of independent noise")
    hours_ratio_low: float | None = optional("lower end of its 90 % interval")
    hours_ratio_high: float | None = optional("upper end")
    message: str | None = optional("why a figure is null")


class Mechanisms(_Priced):
    """The price of a privacy budget with each mechanism, on a target, by one method."""

    method: str
    mechanisms: list[MechanismCost]
