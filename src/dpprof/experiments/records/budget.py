"""What ``dpprof budget`` says: the price of a privacy budget with each method."""

from pydantic import Field

from dpprof.experiments.accounting.plan import NoisePlan
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.records.record import Part


class MethodCost(Part):
    """What a training costs with one method at one epsilon."""

    method: str = Field(description="the method")
    epsilon: float | None = Field(description="null for a method that is not private")
    private: bool = Field(description="whether it is private")
    mechanism: str | None = Field(
        None, description="what makes the method private; null: it has no verdict"
    )
    verified: bool | None = Field(
        None, description="whether its gradient equals the reference's; null: not verified"
    )
    batch_size: int | None = Field(None, description="expected samples of a step")
    steps: int | None = Field(None, description="steps of the training")
    noise_multiplier: float | None = Field(
        None, description="standard deviation of the noise over C"
    )
    same_batch_noise_multiplier: float | None = Field(
        None,
        description="noise multiplier with the planned batch and tokens, which take the hours of "
        "the first epsilon",
    )
    micro_batch_size: int | None = Field(
        None, description="samples that are on the GPU at a time: equal parts of what safely fits"
    )
    accumulation_steps: int | None = Field(None, description="micro-batches of an expected batch")
    step_s: float | None = Field(
        None,
        description="predicted seconds of a step of an expected batch; noise and optimizer run "
        "once in it",
    )
    gpus: int = Field(1, description="GPUs that train the model together")
    gpu_hours: float | None = Field(
        None, description="all steps, predicted: hours of one GPU, or of all together"
    )
    gpu_hours_low: float | None = Field(None, description="lower end of the 90 % interval")
    gpu_hours_high: float | None = Field(None, description="upper end of the 90 % interval")
    price: float | None = Field(None, description="of these hours")
    hours_ratio: float | None = Field(
        None, description="these hours over those of standard with the planned batch"
    )
    message: str | None = Field(None, description="why a figure is null, or needs care")


class Budget(Part):
    """The price of a privacy budget on a target, fastest method first."""

    model: str
    lora: str | None
    seq_len: int
    image_size: int | None = None
    dtype: str
    target: str
    privacy: Privacy
    warnings: list[str] = Field(description="what the budget promises less than people mean")
    noise: NoisePlan
    methods: list[MethodCost]
    sure_of_memory: str
    sure_of_time: str
