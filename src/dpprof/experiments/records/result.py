"""The result of one run: a published, versioned, self-checking JSON file."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.quantities import Positive, optional
from dpprof.experiments.records.record import Device, Part, Provenance, ResultError, read_record
from dpprof.experiments.records.step_costs import Compute, Exchange, Io, Memory
from dpprof.experiments.records.terms import Basis, OpKind, Outcome, Phase
from dpprof.experiments.records.varied import Varied

_OF_A_SCREEN_BYTES = 2**30
_OF_A_SCREEN = 0.05
"""The most that a desktop uses of a GPU's memory and time."""


class Failure(Part):
    """Why a run, or one attempt at it, failed."""

    kind: str = Field(description="the exception's type, the signal's name, or what ended it")
    message: str = Field(description="its message, shortened")
    phase: Phase | None = optional("the phase of the step in which it happened")
    signal: str | None = optional("the signal that ended the process")
    exit_code: int | None = optional("the process's exit code")
    requested_bytes: int | None = optional("size of the failed allocation")
    allocated_bytes: int | None = optional("allocated by the allocator then")
    reserved_bytes: int | None = optional("reserved by the allocator then")
    others_bytes: int | None = optional(
        "device memory that other processes held before or after, the larger value"
    )
    log: str | None = optional("the log file of the run")
    rank: int | None = optional("the rank that failed first, of several")


class Others(Part):
    """Other processes' use of a GPU, at a moment when dpprof did not use it."""

    memory_bytes: int | None = optional("GPU memory in use")
    load: float | None = optional("share of the last second or less in which a kernel ran")
    processes: int | None = optional("computing on it, by the driver's count")
    reason: str | None = optional("why a figure is null")

    @property
    def matter(self) -> bool:
        """Whether they use more than a desktop does."""
        return (self.memory_bytes or 0) > _OF_A_SCREEN_BYTES or (self.load or 0.0) > _OF_A_SCREEN


class Attempt(Part):
    """One process that tried the run."""

    outcome: Outcome
    wall_s: float
    others_busy_cores: float | None = optional(
        "average number of cores that other processes kept busy meanwhile"
    )
    others_before: Others | None = optional("on the GPU, before the attempt")
    others_after: Others | None = optional("on the GPU, after the attempt")
    error: Failure | None = None


class Capacity(Part):
    """The largest batch that fits, found by a search over estimates.

    On CUDA a batch fits if the simulated caching allocator finds room for every request.
    """

    budget_bytes: int = Field(description="memory that training may allocate")
    batch_size: int = Field(description="the largest batch found to fit")
    peak_bytes: int = Field(description="predicted peak of that batch; on CUDA in whole blocks")
    reserved_bytes: int | None = optional("what its allocator would reserve without a limit; CUDA")
    retries: int | None = optional(
        "how often a step of that batch releases the cache to find room; CUDA"
    )
    next_peak_bytes: int | None = Field(
        description="predicted peak of one sample more, by the timeline; null where that was not "
        "estimated"
    )
    limited_by: Literal["memory", "fragmentation", "search"] = Field(
        description="memory; free memory that no segment holds together; or the end of the search"
    )
    unfragmented_batch_size: int | None = optional(
        "the largest batch if free memory were always in one piece; CUDA"
    )
    expandable_batch_size: int | None = optional(
        "the largest batch with expandable_segments:True; CUDA"
    )
    extrapolated: bool = Field(
        description="whether peaks beyond three samples are extrapolated linearly, because the "
        "method processes one sample at a time"
    )
    safe_share: float | None = Field(
        description="share of the budget that a safe batch may take; null on CUDA, where a batch "
        "is safe if the allocator never has to release its cache"
    )
    safe_batch_size: int | None = Field(
        description="the largest safe batch; null where not even the smallest batch is safe"
    )
    safe_peak_bytes: int | None
    stated_batch_size: int = Field(description="the batch size of memory, compute and io")
    smallest_batch_size: int = Field(
        1, description="the smallest batch that the method takes; no smaller one was tried"
    )
    estimates: dict[int, int] = Field(
        description="predicted peak by batch size, for every estimate"
    )


class PredictedTime(Part):
    """The predicted time of a step, with a 90 % interval."""

    median: Positive
    low: Positive
    high: Positive
    without_update: float | None = optional(
        "median of the same step without its phases noise and step, which run once "
        "where gradients of several batches are accumulated"
    )
    rests_on: dict[Basis, float] = Field(
        description="shares of the device's time by what its prediction rests on"
    )
    waiting_share: float = Field(
        description="share of the step in which the device waits for the host"
    )
    communication_share: float | None = optional(
        "share of the step in which a rank waits for what ranks exchange; null: one rank"
    )
    between_sources: float = Field(
        0.0,
        description="what low and high have beyond the errors of operators, for programs and "
        "machines that differ: a standard deviation of the logarithm",
    )
    unlike: str | None = optional("what of the step nobody measured, where there is such a thing")

    @property
    def update(self) -> float:
        """Seconds of noise and optimizer, which run once in a step of several batches."""
        return 0.0 if self.without_update is None else self.median - self.without_update

    def each_sample(self, batch_size: int) -> float:
        """Return the seconds of a sample without noise and optimizer, in a step of a batch."""
        return (self.median - self.update) / batch_size


class Time(Part):
    """Raw step times, and the median that represents this process; or a prediction."""

    step_s: list[Positive] = Field(description="empty where nothing was timed")
    warmup_step_s: list[float] | None = None
    median_s: Positive | None = None
    phases_s: dict[Phase, list[float]] | None = optional(
        "seconds of each phase, one value per timed step"
    )
    predicted_step_s: PredictedTime | None = optional("by estimate and capacity, for a GPU")


class Throughput(Part):
    """Throughput at the median step time."""

    tokens_per_s: Positive = Field(description="throughput at the median step time")
    samples_per_s: Positive = Field(description="the same in samples")
    steps_per_s: Positive = Field(description="the same in steps")


class Launched(Part):
    """Time per step of the work of one op kind in one phase."""

    phase: Phase | None = Field(description="null for work launched between phases")
    op_kind: OpKind = Field(description="the op kind")
    seconds: float = Field(description="time of a step")
    launches: float = Field(description="average number per step")


class Kernel(Launched):
    """All launches of one kernel by one operator, or all calls of one operator on a CPU."""

    name: str
    op: str | None = Field(description="the operator that launched it")


class Copied(Part):
    """Bytes copied in one direction per step."""

    bytes: float
    seconds: float
    copies: float


class Kernels(Part):
    """Time of a step by kernel: kernels of a GPU, or operators of a CPU.

    All values are per step, averaged over the traced steps.
    """

    steps: int = Field(description="number of traced steps")
    step_s: float = Field(description="time of a step, including the tracer")
    total_s: float = Field(description="summed time of all kernels")
    by_op_kind: dict[OpKind, float] = Field(description="seconds; they sum to total_s")
    by_phase: dict[Phase, float] = Field(
        description="seconds by the phase in which kernels were launched"
    )
    by_phase_and_op_kind: list[Launched]
    other_share: float = Field(description="share of total_s whose op kind is unknown")
    idle_s: float = Field(
        description="part of step_s in which no kernel ran; on a CPU no operator that does work, "
        "which leaves Python, autograd and the dispatch of operators"
    )
    waiting_s: float | None = Field(
        description="part of idle_s before kernels that were launched only after the previous "
        "kernel had ended"
    )
    largest: list[Kernel] = Field(description="the kernels that took most time, longest first")
    copies: dict[str, Copied] = Field(
        description="copies between host and device and within the device, by the driver's names"
    )
    trace: str | None = Field(description="the trace's file, for Perfetto and TensorBoard")
    trace_bytes: int | None = Field(description="its size")
    trace_steps: int = Field(description="number of steps in the file")


class Energy(Part):
    """Energy that the device used over a window of steps, by the driver's counter."""

    joules_per_step: float = Field(description="energy of a step")
    window_s: float
    steps: int
    source: str


class HostIo(Part):
    """Bytes that the process read and wrote in the timed steps, by the operating system's count."""

    bytes_read: int = Field(description="by any call, served from the page cache or not")
    bytes_written: int
    storage_bytes_read: int = Field(description="bytes that storage had to fetch")
    storage_bytes_written: int
    steps: int


class Observed(Part):
    """Step time and memory with this instrument in the process."""

    step_s: float = Field(description="the median over steps; the mean of traced steps")
    steps: int
    peak_rss_bytes: int
    peak_allocated_bytes: int | None = Field(description="by the allocator, where it counts")


class ModelFacts(Part):
    """The model as counted, not as computed from a formula."""

    parameters_total: int
    parameters_trainable: int
    parameters_bytes: int
    unquantized_experts_bytes: int = Field(
        0, description="of fused experts, which transformers does not quantise with linear layers"
    )


class NormChoice(Part):
    """How the norms of a matrix's per-sample gradients were computed, and why."""

    way: str
    tokens: int = Field(description="tokens of a sample")
    inputs: int = Field(description="width of the matrix's input")
    outputs: int = Field(description="width of the matrix's output")
    flops: int = Field(description="FLOPs of matrix products for the norm of one sample")
    prices: dict[str, int] = Field(description="cost of each way: FLOPs, and bytes as FLOPs")
    tiles: dict[str, int] | None = optional(
        "tile sizes that tuning chose for the Triton kernel; null where PyTorch's "
        "operators computed the norm, or nothing ran"
    )


class RankPart(Part):
    """What one of several ranks measured of itself."""

    rank: int = Field(description="the rank, from 0")
    memory: Memory | None
    time: Time | None
    communication: list[Exchange] | None
    observed: Observed | None
    nonfinite_samples: int | None


class Measurement(Part):
    """What an instrument returns from inside the process; the supervisor adds the rest."""

    model: ModelFacts | None = None
    samplers: dict[str, str] | None = None
    norm_plan: dict[str, NormChoice] | None = None
    nonfinite_samples: int | None = optional(
        "samples left out in all steps together because their loss or gradient was "
        "not finite; null where the method does not count them"
    )
    capacity: Capacity | None = None
    varied: Varied | None = optional("of batches that differ, by lengths or poisson")
    memory: Memory | None = None
    time: Time | None = None
    throughput: Throughput | None = None
    compute: Compute | None = None
    io: Io | None = None
    host_io: HostIo | None = None
    kernels: Kernels | None = None
    energy: Energy | None = None
    observed: Observed | None = None
    verification: None = None
    privacy: None = None
    communication: list[Exchange] | None = optional(
        "what a rank exchanges with others in a step; null without parallel"
    )
    ranks: list[RankPart] | None = optional(
        "every rank's part, where several ranks ran; what is above is rank 0's, whose "
        "shards are the largest, and throughput is that of all"
    )
    reasons: dict[str, str] = Field(
        default_factory=dict,
        description="why a figure that this instrument should produce is null, by dotted key",
    )


class Result(Measurement):
    """One JSON file per run. Every key is always present; unknown values are null."""

    schema_version: Literal[2] = 2
    experiment_id: str
    experiment: Experiment
    spec_digest: str = Field(description="sha256 of the experiment's canonical JSON")
    code_digest: str = Field(description="sha256 of the sources and versions that measured")
    content_digest: str = Field(description="sha256 of the canonical JSON of everything else")
    instrument: str
    replicate: int = Field(ge=0)
    outcome: Outcome
    error: Failure | None = None
    attempts: list[Attempt] = Field(min_length=1)
    started_at: str = Field(
        description="UTC, ISO 8601, when the first attempt started; where a scheduler has "
        "interrupted the run, the first in its last job"
    )
    wall_s: float = Field(description="from started_at to the end of the last attempt")
    device: Device
    provenance: Provenance


def read_result(path: Path) -> Result:
    """Read and check a result file.

    Raises:
        ResultError: The file is cut, edited, of another schema version, or its spec digest is not
            its experiment's.
        FileNotFoundError: There is no such file.
    """
    result = read_record(path, Result)
    if result.spec_digest != result.experiment.digest:
        raise ResultError(path, "has a spec digest that is not its experiment's")
    return result


def result_path(root: Path, instrument: str, experiment_id: str, replicate: int) -> Path:
    """Return the path of a run's result: ``results/<instrument>/<id>.r<N>.json``."""
    return root / "results" / instrument / f"{experiment_id}.r{replicate}.json"


def interrupted_path(path: Path) -> Path:
    """Return the path of the copy of a result whose job a scheduler has ended."""
    return path.with_name(f"{path.name}.interrupted")


def read_run(root: Path, instrument: str, experiment_id: str, replicate: int) -> Result:
    """Read the result of one run, and check that it is this run's.

    Raises:
        ResultError: As ``read_result``, or the file holds another run.
        FileNotFoundError: There is no result yet.
    """
    path = result_path(root, instrument, experiment_id, replicate)
    result = read_result(path)
    run = (result.instrument, result.experiment_id, result.replicate)
    if run != (instrument, experiment_id, replicate):
        raise ResultError(path, f"holds another run, {run[1]} {run[0]} r{run[2]}")
    return result


def drop_copies(results: Path) -> None:
    """Delete the copies of results that are there, since their jobs did end well after all."""
    for copy in results.glob(str(interrupted_path(Path("*/*.json")))):
        if copy.with_suffix("").exists():
            copy.unlink()
