"""What ``dpprof budget --mechanism`` says: what correlated noise brings and costs."""

from pydantic import Field

from dpprof.experiments.accounting.mechanism_plan import NoiseOfMechanism
from dpprof.experiments.accounting.plan import NoisePlan
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.quantities import optional
from dpprof.experiments.records.record import Part


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


class Mechanisms(Part):
    """The price of a privacy budget with each mechanism, on a target, by one method."""

    model: str
    method: str
    seq_len: int
    image_size: int | None = None
    dtype: str
    optimizer: str
    target: str
    privacy: Privacy
    warnings: list[str] = Field(description="what the budget promises less than people mean")
    noise: NoisePlan
    mechanisms: list[MechanismCost]
    rests_on: dict[str, float] = Field(
        default_factory=dict,
        description="shares of the device's time by what predicted speeds rest on",
    )
