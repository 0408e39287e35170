"""The result of one run: a published, versioned, self-checking JSON file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from dpprof.records.record import Part, ResultError, read_record, write_record
from dpprof.spec.experiment import Experiment

SCHEMA_VERSION: Literal[2] = 2
OLDER: Mapping[object, str] = {
    1: "since then the instrument ledger is called memory, and category is called op_kind; "
    "snakemake measures it again"
}
"""By older schema version, what has changed since."""

Outcome = Literal["ok", "oom", "unsupported", "timeout", "killed", "crashed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

Phase = Literal["setup", "forward", "backward", "second_backward", "clip", "noise", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)


Component = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "saved_activations",
    "dp_activations",
    "output_gradients",
    "per_sample_gradients",
    "norm_samples",
    "gram_matrices",
    "summed_gradients",
    "noise",
    "inputs",
    "logits_and_loss",
    "workspace",
    "unattributed",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)

Evidence = Literal["identity", "birthplace", "phase"]
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)


OpKind = Literal[
    "gemm",
    "attention",
    "einsum",
    "norm",
    "clip",
    "optimizer",
    "elementwise",
    "reduce",
    "indexing",
    "random",
    "copy",
    "other",
]
OP_KINDS: tuple[OpKind, ...] = get_args(OpKind)


_OF_A_SCREEN_BYTES = 2**30
_OF_A_SCREEN = 0.05
"""The most that a desktop uses of a GPU's memory and time."""


class Failure(Part):
    """Why a run, or one attempt at it, failed."""

    kind: str = Field(description="the exception's type, the signal's name, or what ended it")
    message: str = Field(description="its message, shortened")
    phase: Phase | None = Field(None, description="the phase of the step in which it happened")
    signal: str | None = Field(None, description="the signal that ended the process")
    exit_code: int | None = Field(None, description="the process's exit code")
    requested_bytes: int | None = Field(None, description="size of the failed allocation")
    allocated_bytes: int | None = Field(None, description="allocated by the allocator then")
    reserved_bytes: int | None = Field(None, description="reserved by the allocator then")
    others_bytes: int | None = Field(
        None,
        description="device memory that other processes held before or after, the larger value",
    )
    log: str | None = Field(None, description="the log file of the run")


class Others(Part):
    """Other processes' use of a GPU, at a moment when dpprof did not use it."""

    memory_bytes: int | None = Field(None, description="GPU memory in use")
    load: float | None = Field(
        None, description="share of the last second or less in which a kernel ran"
    )
    processes: int | None = Field(None, description="computing on it, by the driver's count")
    reason: str | None = Field(None, description="why a figure is null")

    @property
    def matter(self) -> bool:
        """Whether they use more than a desktop does."""
        return (self.memory_bytes or 0) > _OF_A_SCREEN_BYTES or (self.load or 0.0) > _OF_A_SCREEN


class Attempt(Part):
    """One process that tried the run."""

    outcome: Outcome
    wall_s: float
    others_busy_cores: float | None = Field(
        None, description="average number of cores that other processes kept busy meanwhile"
    )
    others_before: Others | None = Field(None, description="on the GPU, before the attempt")
    others_after: Others | None = Field(None, description="on the GPU, after the attempt")
    error: Failure | None = None


class Snapshot(Part):
    """The allocator's counts at a named moment."""

    name: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = Field(None, description="resident memory of the process")
    elapsed_s: float = Field(description="time since the libraries were imported")
    components: dict[str, int] | None = Field(
        None, description="bytes by owner; with unattributed they sum to allocated_bytes"
    )


class Held(Part):
    """Storages alive at the peak that have the same owner and the same origin."""

    component: Component
    evidence: Evidence | None
    bytes: int
    storages: int
    op: str = Field(description="the operator that created them")
    phase: Phase
    module: str | None = Field(description="the module whose forward or backward ran then")
    function: str | None = Field(description="the function that ran then: module:function")


class AtPeak(Part):
    """The owners of memory at the peak of a steady-state step, and the cause of the peak."""

    components: dict[Component, int] = Field(description="bytes; they sum to the timeline's peak")
    phase: Phase
    module: str | None
    op: str | None
    largest: list[Held] = Field(description="the largest holdings, largest first")


class Timeline(Part):
    """Memory timeline: live bytes by component over one steady-state step, at selected instants."""

    ops: list[int] = Field(description="number of operators run since the step began")
    elapsed_s: list[float] | None = Field(description="time since then, including the instrument")
    phase: list[Phase]
    components: dict[Component, list[int]]


class Attribution(Part):
    """How far the timeline is reconciled, and how owners were identified."""

    valid: bool | None = Field(description="whether the gap is within its bound")
    timeline_peak_bytes: int
    allocator_peak_bytes: int | None
    gap_bytes: int | None = Field(description="the allocator's peak minus the timeline's")
    evidence: dict[Evidence, int] = Field(
        description="bytes at the peak by how their owner was identified; with unattributed "
        "they sum to the timeline's peak"
    )
    reason: str | None


class Compute(Part):
    """FLOPs of one steady-state step, of matrix products and attention if not stated otherwise."""

    model_flops: int | None = Field(description="6 N + 12 L d T per token (PaLM, appendix B)")
    executed_flops: int
    other_flops: int = Field(description="FLOPs of elementwise operators and reductions")
    flops_by_phase: dict[Phase, int]
    flops_by_module: dict[str, int]
    flops_by_component: dict[Component, int] = Field(description="FLOPs by the owner of the output")
    dp_flop_multiplier: float | None = Field(description="executed FLOPs over model FLOPs")
    mfu: float | None
    hfu: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    roofline_step_s: float | None = Field(
        description="lower bound of the step time: each operator at the ceiling that binds it"
    )
    reason: str | None


class Moved(Part):
    """The least bytes that operators must read and write."""

    read: int
    written: int


class Work(Part):
    """The FLOPs and bytes of operators of one kind in one phase."""

    phase: Phase
    op_kind: OpKind
    ops: int
    flops: int = Field(description="all FLOPs, including elementwise operators and reductions")
    read: int
    written: int


class Io(Part):
    """Memory traffic of one steady-state step, if each operator reads and writes its data once."""

    bytes_read: int
    bytes_written: int
    by_phase: dict[Phase, Moved]
    by_op_kind: dict[OpKind, Moved]
    by_module: dict[str, Moved]
    by_component: dict[Component, Moved]
    by_phase_and_op_kind: list[Work]
    arithmetic_intensity: float | None = Field(description="executed FLOPs over bytes moved")


class Memory(Part):
    """Peaks of the steady state (the timed steps), and of the first step where it differs."""

    peak_allocated_bytes: int | None = None
    first_step_peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = Field(
        None, description="largest resident memory of the whole process, including imports"
    )
    peak_device_used_bytes: int | None = Field(
        None, description="device memory in use by all processes after the timed steps"
    )
    alloc_retries: int | None = None
    snapshots: list[Snapshot] = Field(default_factory=list)
    at_peak: AtPeak | None = None
    timeline: Timeline | None = None
    attribution: Attribution | None = None
    assumed: dict[str, str] = Field(
        default_factory=dict,
        description="what is assumed about the device, and why",
    )


class Capacity(Part):
    """The largest batch that fits, found by a search over estimates."""

    budget_bytes: int = Field(description="memory that training may allocate")
    batch_size: int = Field(description="the largest batch found to fit")
    peak_bytes: int = Field(description="predicted peak of that batch")
    next_peak_bytes: int | None = Field(
        description="predicted peak of one sample more, which does not fit; null where the search "
        "ended before the memory was full"
    )
    limited_by: Literal["memory", "search"]
    extrapolated: bool = Field(
        description="whether peaks beyond two samples are extrapolated linearly, because the "
        "method processes one sample at a time"
    )
    safe_share: float = Field(description="share of the budget that a safe batch may take")
    safe_batch_size: int | None = Field(
        description="the largest batch within that share; null where even one sample exceeds it"
    )
    safe_peak_bytes: int | None
    stated_batch_size: int = Field(description="the batch size of memory, compute and io")
    estimates: dict[int, int] = Field(
        description="predicted peak by batch size, for every estimate"
    )


class Time(Part):
    """Raw step times, and the median that represents this process."""

    step_s: list[float]
    warmup_step_s: list[float] | None
    median_s: float
    phases_s: dict[Phase, list[float]] | None = Field(
        None, description="seconds of each phase, one value per timed step"
    )


class Throughput(Part):
    """Throughput at the median step time."""

    tokens_per_s: float
    samples_per_s: float
    steps_per_s: float


class Launched(Part):
    """Time per step of the work of one op kind in one phase."""

    phase: Phase | None = Field(description="null for work launched between phases")
    op_kind: OpKind
    seconds: float
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
    trace_bytes: int | None
    trace_steps: int = Field(description="number of steps in the file")


class Energy(Part):
    """Energy that the device used over a window of steps, by the driver's counter."""

    joules_per_step: float
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


class NormChoice(Part):
    """How the norms of a matrix's per-sample gradients were computed, and why."""

    way: str
    tokens: int = Field(description="tokens of a sample")
    inputs: int = Field(description="width of the matrix's input")
    outputs: int = Field(description="width of the matrix's output")
    flops: int = Field(description="FLOPs of matrix products for the norm of one sample")
    prices: dict[str, int] = Field(description="cost of each way: FLOPs, and bytes as FLOPs")
    tiles: dict[str, int] | None = Field(
        None,
        description="tile sizes that tuning chose for the Triton kernel; null where PyTorch's "
        "operators computed the norm, or nothing ran",
    )


class Measurement(Part):
    """What an instrument returns from inside the process; the supervisor adds the rest."""

    model: ModelFacts | None = None
    samplers: dict[str, str] | None = None
    norm_plan: dict[str, NormChoice] | None = None
    nonfinite_samples: int | None = Field(
        None,
        description="samples left out in all steps together because their loss or gradient was "
        "not finite; null where the method does not count them",
    )
    capacity: Capacity | None = None
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
    reasons: dict[str, str] = Field(
        default_factory=dict,
        description="why a figure that this instrument should produce is null, by dotted key",
    )


class Result(Measurement):
    """One JSON file per run. Every key is always present; unknown values are null."""

    schema_version: Literal[2] = SCHEMA_VERSION
    experiment_id: str
    experiment: Experiment
    spec_digest: str = Field(description="sha256 of the experiment's canonical JSON")
    code_digest: str = Field(description="sha256 of the sources and versions that measured")
    content_digest: str = Field(description="sha256 of the canonical JSON of everything else")
    instrument: str
    replicate: int = Field(ge=0)
    outcome: Outcome
    error: Failure | None = None
    attempts: list[Attempt]
    started_at: str = Field(description="UTC, ISO 8601, when the first attempt started")
    wall_s: float = Field(description="from started_at to the end of the last attempt")
    device: dict[str, Any]
    provenance: dict[str, Any]


def write_result(path: Path, fields: dict[str, Any]) -> Result:
    """Write a result with its content digest, as a whole.

    Args:
        path: The file; replaced atomically.
        fields: Every field of ``Result`` but ``content_digest``.
    """
    return write_record(path, Result, fields)


def read_result(path: Path) -> Result:
    """Read and check a result file.

    Raises:
        ResultError: The file is cut, edited, of another schema version, or its spec digest is not
            its experiment's.
        FileNotFoundError: There is no such file.
    """
    result = read_record(path, Result, SCHEMA_VERSION, OLDER)
    if result.spec_digest != result.experiment.digest:
        raise ResultError(path, "has a spec digest that is not its experiment's")
    return result


def result_path(root: Path, instrument: str, experiment_id: str, replicate: int) -> Path:
    """Return the path of a run's result: ``results/<instrument>/<id>.r<N>.json``."""
    return root / "results" / instrument / f"{experiment_id}.r{replicate}.json"


def read_run(root: Path, instrument: str, experiment_id: str, replicate: int) -> Result:
    """Read the result of one run, and check that it is this run's.

    Raises:
        ResultError: As ``read_result``, or the file holds another run.
        FileNotFoundError: There is no result yet.
    """
    path = result_path(root, instrument, experiment_id, replicate)
    result = read_result(path)
    found = (result.instrument, result.experiment_id, result.replicate)
    if found != (instrument, experiment_id, replicate):
        raise ResultError(path, f"holds another run, {found[1]} {found[0]} r{found[2]}")
    return result
