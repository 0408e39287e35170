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
"""What has changed since other versions of the schema."""

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
"""What a desktop takes of a GPU's memory and time, at most."""


class Failure(Part):
    """Why a run, or one attempt at it, did not end well."""

    kind: str = Field(description="the exception's type, the signal's name, or what ended it")
    message: str = Field(description="what it said, shortened")
    phase: Phase | None = Field(None, description="where in the step it happened")
    signal: str | None = Field(None, description="the signal that ended the process")
    exit_code: int | None = Field(None, description="the process's exit code")
    requested_bytes: int | None = Field(None, description="the allocation that failed")
    allocated_bytes: int | None = Field(None, description="allocated by the allocator just then")
    reserved_bytes: int | None = Field(None, description="reserved by the allocator just then")
    others_bytes: int | None = Field(
        None, description="of the device's memory, held by others before or after, the larger"
    )
    log: str | None = Field(None, description="the log file of the run")


class Others(Part):
    """What others held and did on a GPU at a moment when nothing of dpprof's was on it."""

    memory_bytes: int | None = Field(None, description="of its memory, in use")
    load: float | None = Field(
        None, description="share of the last second or less in which a kernel ran"
    )
    processes: int | None = Field(None, description="that compute on it, as the driver tells")
    reason: str | None = Field(None, description="why a figure is null")

    @property
    def matter(self) -> bool:
        """Whether it is more than a screen takes."""
        return (self.memory_bytes or 0) > _OF_A_SCREEN_BYTES or (self.load or 0.0) > _OF_A_SCREEN


class Attempt(Part):
    """One process that tried the run."""

    outcome: Outcome
    wall_s: float
    others_busy_cores: float | None = Field(
        None, description="cores that other processes kept busy meanwhile, on average"
    )
    others_before: Others | None = Field(None, description="on the GPU, before it began")
    others_after: Others | None = Field(None, description="on the GPU, when it had ended")
    error: Failure | None = None


class Snapshot(Part):
    """What the allocator counted at a named moment."""

    name: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = Field(None, description="resident memory of the process")
    elapsed_s: float = Field(description="since the libraries were imported")
    components: dict[str, int] | None = Field(
        None, description="bytes by owner; with unattributed they sum to allocated_bytes"
    )


class Held(Part):
    """Storages that were alive at the peak and have their owner and birthplace in common."""

    component: Component
    evidence: Evidence | None
    bytes: int
    storages: int
    op: str = Field(description="the operator that made them")
    phase: Phase
    module: str | None = Field(description="whose forward or backward was under way")
    function: str | None = Field(description="the function that was under way: module:function")


class AtPeak(Part):
    """Who owned what at the peak of the steady step, and what made the peak."""

    components: dict[Component, int] = Field(description="bytes; they sum to the timeline's peak")
    phase: Phase
    module: str | None
    op: str | None
    largest: list[Held] = Field(description="the largest holdings, the largest first")


class Timeline(Part):
    """Live bytes by component over one steady step: the instants that matter, in order."""

    ops: list[int] = Field(description="operators that had run since the step began")
    elapsed_s: list[float] | None = Field(description="since then, the instrument in it")
    phase: list[Phase]
    components: dict[Component, list[int]]


class Attribution(Part):
    """How far the timeline can be believed."""

    valid: bool | None = Field(description="whether the gap is within its bound")
    timeline_peak_bytes: int
    allocator_peak_bytes: int | None
    gap_bytes: int | None = Field(description="the allocator's peak less the timeline's")
    evidence: dict[Evidence, int] = Field(
        description="bytes at the peak by what their owner is known from; with unattributed "
        "they sum to the timeline's peak"
    )
    reason: str | None


class Compute(Part):
    """FLOPs of one steady step; products of matrices and attention alone where not said."""

    model_flops: int | None = Field(description="6 N + 12 L d T for each token (PaLM, appendix B)")
    executed_flops: int
    other_flops: int = Field(description="elementwise operators and reductions")
    flops_by_phase: dict[Phase, int]
    flops_by_module: dict[str, int]
    flops_by_component: dict[Component, int] = Field(description="by who owns the output")
    dp_flop_multiplier: float | None = Field(description="executed over model FLOPs")
    mfu: float | None
    hfu: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    roofline_step_s: float | None = Field(
        description="no step can be faster: each operator at the ceiling that binds it"
    )
    reason: str | None


class Moved(Part):
    """Bytes that operators must at least read and write."""

    read: int
    written: int


class Work(Part):
    """What the operators of one kind did in one phase."""

    phase: Phase
    op_kind: OpKind
    ops: int
    flops: int = Field(description="all of them, elementwise operators and reductions too")
    read: int
    written: int


class Io(Part):
    """Memory traffic of one steady step, had each operator read and written all once."""

    bytes_read: int
    bytes_written: int
    by_phase: dict[Phase, Moved]
    by_op_kind: dict[OpKind, Moved]
    by_module: dict[str, Moved]
    by_component: dict[Component, Moved]
    by_phase_and_op_kind: list[Work]
    arithmetic_intensity: float | None = Field(description="executed FLOPs over bytes moved")


class Memory(Part):
    """Peaks of the steady state (the timed steps), and of the first step where they differ."""

    peak_allocated_bytes: int | None = None
    first_step_peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = Field(
        None, description="resident high-water mark of the whole process, imports included"
    )
    peak_device_used_bytes: int | None = Field(
        None, description="device memory in use by everybody after the timed steps"
    )
    alloc_retries: int | None = None
    snapshots: list[Snapshot] = Field(default_factory=list)
    at_peak: AtPeak | None = None
    timeline: Timeline | None = None
    attribution: Attribution | None = None
    assumed: dict[str, str] = Field(
        default_factory=dict,
        description="what is taken for granted of a device, and why",
    )


class Capacity(Part):
    """The largest batch that fits, found by estimates: as many as it took, no formula."""

    budget_bytes: int = Field(description="memory that the training may allocate")
    batch_size: int = Field(description="the largest batch that was found to fit")
    peak_bytes: int = Field(description="predicted for that batch")
    next_peak_bytes: int | None = Field(
        description="predicted for one sample more, which does not fit; null where the search "
        "ended before memory did"
    )
    limited_by: Literal["memory", "search"]
    extrapolated: bool = Field(
        description="whether peaks beyond two samples continue a straight line, because the "
        "method processes samples one at a time"
    )
    safe_share: float = Field(description="share of the budget that a safe batch may take")
    safe_batch_size: int | None = Field(
        description="the largest batch within that share; null where not even one sample is"
    )
    safe_peak_bytes: int | None
    stated_batch_size: int = Field(description="the batch that memory, compute and io are of")
    estimates: dict[int, int] = Field(description="predicted peak by batch size, each one made")


class Time(Part):
    """Raw samples, and the median that stands for this process."""

    step_s: list[float]
    warmup_step_s: list[float] | None
    median_s: float
    phases_s: dict[Phase, list[float]] | None = Field(
        None, description="seconds of each phase in each timed step, one value a step"
    )


class Throughput(Part):
    """What the median step time amounts to."""

    tokens_per_s: float
    samples_per_s: float
    steps_per_s: float


class Launched(Part):
    """How long the work of one kind in one phase took, in a step."""

    phase: Phase | None = Field(description="null for what was launched between phases")
    op_kind: OpKind
    seconds: float
    launches: float = Field(description="how many in a step, on average")


class Kernel(Launched):
    """All launches of one kernel by one operator, or all calls of one operator on a CPU."""

    name: str
    op: str | None = Field(description="the operator that launched it")


class Copied(Part):
    """Bytes that moved in one direction in a step."""

    bytes: float
    seconds: float
    copies: float


class Kernels(Part):
    """Where the time of a step goes by kernel: kernels of a GPU, or operators of a CPU.

    All of it is for one step, an average over the traced ones.
    """

    steps: int = Field(description="steps that were traced")
    step_s: float = Field(description="what a step took, the tracer in it")
    total_s: float = Field(description="all kernels, one after another")
    by_op_kind: dict[OpKind, float] = Field(description="seconds; they sum to total_s")
    by_phase: dict[Phase, float] = Field(description="seconds, by where they were launched")
    by_phase_and_op_kind: list[Launched]
    other_share: float = Field(description="of total_s whose kind of operator is not known")
    idle_s: float = Field(
        description="of step_s in which no kernel ran; on a CPU: no operator that does work, so "
        "what is left are Python, autograd and the dispatch of operators"
    )
    waiting_s: float | None = Field(
        description="of idle_s: the next kernel was launched only after the one before had ended"
    )
    largest: list[Kernel] = Field(description="those that took most, the most first")
    copies: dict[str, Copied] = Field(
        description="between host and device and within the device, as the driver names them"
    )
    trace: str | None = Field(description="the trace's file, for Perfetto and TensorBoard")
    trace_bytes: int | None
    trace_steps: int = Field(description="steps that the file holds")


class Energy(Part):
    """What the device used up over a window of steps, by the driver's counter."""

    joules_per_step: float
    window_s: float
    steps: int
    source: str


class HostIo(Part):
    """What the process read and wrote in the timed steps, as the operating system counts it."""

    bytes_read: int = Field(description="by any call, served from the page cache or not")
    bytes_written: int
    storage_bytes_read: int = Field(description="what storage really had to fetch")
    storage_bytes_written: int
    steps: int


class Observed(Part):
    """What a step and its memory came to with this instrument in the process."""

    step_s: float = Field(description="the median over steps; of traced ones the mean")
    steps: int
    peak_rss_bytes: int
    peak_allocated_bytes: int | None = Field(description="the allocator's, where it keeps count")


class ModelFacts(Part):
    """The model as counted, not as computed from a formula."""

    parameters_total: int
    parameters_trainable: int
    parameters_bytes: int


class NormChoice(Part):
    """Which way the norms of a matrix's per-sample gradients went, and why."""

    way: str
    tokens: int = Field(description="of a sample")
    inputs: int = Field(description="width of what the matrix is multiplied with")
    outputs: int = Field(description="width of what comes of it")
    flops: int = Field(description="of the norm of one sample, in products of matrices")
    prices: dict[str, int] = Field(description="what the ways cost: FLOPs, and bytes as FLOPs")
    tiles: dict[str, int] | None = Field(
        None,
        description="what tuning chose for the Triton kernel that ran; null where PyTorch's "
        "operators found the norm, or nothing ran",
    )


class Measurement(Part):
    """What an instrument hands back from inside the process; the rest is added outside."""

    model: ModelFacts | None = None
    samplers: dict[str, str] | None = None
    norm_plan: dict[str, NormChoice] | None = None
    nonfinite_samples: int | None = Field(
        None,
        description="samples that all steps left out, as loss or gradient was not finite; null "
        "where the method does not count them",
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
        description="why a figure of a part that this instrument produces is null, by dotted key",
    )


class Result(Measurement):
    """One JSON file per run. Every key is always present; what is not known is null."""

    schema_version: Literal[2] = SCHEMA_VERSION
    experiment_id: str
    experiment: Experiment
    spec_digest: str = Field(description="sha256 of the experiment's canonical JSON")
    code_digest: str = Field(description="sha256 over the sources and versions that measured")
    content_digest: str = Field(description="sha256 of the canonical JSON of everything else")
    instrument: str
    replicate: int = Field(ge=0)
    outcome: Outcome
    error: Failure | None = None
    attempts: list[Attempt]
    started_at: str = Field(description="UTC, ISO 8601, when the first attempt started")
    wall_s: float = Field(description="from then to the end of the last attempt")
    device: dict[str, Any]
    provenance: dict[str, Any]


def write_result(path: Path, fields: dict[str, Any]) -> Result:
    """Complete a result with its content digest and write it as a whole.

    Args:
        path: Where it goes; replaced atomically.
        fields: Every field of ``Result`` but ``content_digest``.
    """
    return write_record(path, Result, fields)


def read_result(path: Path) -> Result:
    """Read and check a result file.

    Raises:
        ResultError: The file is cut, edited, of another schema version, or filed under
            a name that is not its own.
        FileNotFoundError: There is no such file.
    """
    result = read_record(path, Result, SCHEMA_VERSION, OLDER)
    if result.spec_digest != result.experiment.digest:
        raise ResultError(path, "has a spec digest that is not its experiment's")
    return result


def result_path(root: Path, instrument: str, experiment_id: str, replicate: int) -> Path:
    """Say where a run's result lives: ``results/<instrument>/<id>.r<N>.json``."""
    return root / "results" / instrument / f"{experiment_id}.r{replicate}.json"


def read_run(root: Path, instrument: str, experiment_id: str, replicate: int) -> Result:
    """Read the result of one run and make sure that it is this run's.

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
