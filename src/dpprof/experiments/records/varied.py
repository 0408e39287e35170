"""What is predicted of a training whose batches differ."""

from pydantic import Field

from dpprof.experiments.config.quantities import Positive, optional
from dpprof.experiments.records.record import Part


class VariedBatch(Part):
    """One of the batches of a training whose batches differ."""

    batch_size: int = Field(description="its samples")
    seq_len: int = Field(description="tokens to which its samples are padded")
    share: float = Field(
        description="share of the batches; of a Poisson-sampled one, of those too "
        "that have fewer samples than this one and more than the next smaller here"
    )
    peak_bytes: int = Field(description="predicted peak of allocated memory")
    step_s: Positive | None = optional("predicted seconds of its step, for a GPU")


class Varied(Part):
    """A training whose batches differ: each, and what the allocator reserves over many steps."""

    batches: list[VariedBatch]
    steps: int = Field(0, description="steps that were played in random order, on a GPU")
    reserved_mean_bytes: int | None = optional("bytes reserved after a step, in the mean")
    reserved_p99_bytes: int | None = optional("bytes reserved after 99 of 100 steps, at most")
    reserved_most_bytes: int | None = optional("the most bytes reserved after a step")
    expandable_reserved_bytes: int | None = optional(
        "the same with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    fits: bool | None = optional("whether every request finds room within the target's memory")

    @property
    def mean_step_s(self) -> float | None:
        """Seconds of a step in the mean, for a GPU."""
        times = [batch.share * batch.step_s for batch in self.batches if batch.step_s is not None]
        return sum(times) if len(times) == len(self.batches) else None
