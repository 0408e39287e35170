"""What a result says of a step's memory, FLOPs and bytes moved."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from dpprof.experiments.config.quantities import optional
from dpprof.experiments.records.record import Natural, Part
from dpprof.experiments.records.terms import Component, Evidence, OpKind, Phase

Peak = Annotated[int, Field(gt=0)]  # the most bytes, of which a model has some


class Snapshot(Part):
    """The allocator's counts at a named moment."""

    name: str = Field(description="the moment")
    allocated_bytes: int | None = optional("bytes allocated then")
    reserved_bytes: int | None = optional("bytes reserved then")
    rss_bytes: int | None = optional("resident memory of the process then")
    elapsed_s: float = Field(description="time since the libraries were imported")
    components: dict[str, int] | None = optional(
        "bytes by owner; with unattributed they sum to allocated_bytes"
    )


class LiveAllocation(Part):
    """Storages alive at the peak that have the same owner and the same origin."""

    component: Component = Field(description="what the memory is for")
    evidence: Evidence | None = Field(description="how that is known")
    bytes: int = Field(description="what the storages hold together")
    storages: int = Field(description="storages of the same owner and origin")
    op: str = Field(description="the operator that created them")
    phase: Phase = Field(description="the phase in which it ran")
    module: str | None = Field(description="the module whose forward or backward ran then")
    function: str | None = Field(description="the function that ran then: module:function")


class Holdings(Part):
    """Every byte that is live at the peak, as columns: what is held where, and what allocated it.

    Together the rows of a component have the bytes that ``AtPeak.components`` states.
    """

    component: list[Component]
    layer: list[str | None] = Field(
        description="the module whose parameter it belongs to, else the module whose forward or "
        "backward ran when it was allocated; null outside the model"
    )
    op: list[str] = Field(description="the operator that allocated it")
    phase: list[Phase] = Field(description="the phase of the step in which it was allocated")
    bytes: list[int]
    storages: list[int] = Field(description="how many storages hold the bytes")

    @model_validator(mode="after")
    def _refuse_ragged_columns(self) -> Self:
        if len({len(column) for _, column in self}) != 1:
            raise ValueError("the columns of holdings must be equally long")
        return self


class AtPeak(Part):
    """The owners of memory at the peak of a steady-state step, and the cause of the peak."""

    components: dict[Component, int] = Field(description="bytes; they sum to the timeline's peak")
    phase: Phase
    module: str | None
    op: str | None
    largest: list[LiveAllocation] = Field(description="the largest holdings, largest first")
    holdings: Holdings | None = optional("all of them, by component, layer, operator and phase")

    @model_validator(mode="after")
    def _refuse_another_sum(self) -> Self:
        if self.holdings is not None:
            sums = dict.fromkeys(self.components, 0)
            for component, size in zip(self.holdings.component, self.holdings.bytes, strict=True):
                sums[component] = sums.get(component, 0) + size
            if sums != self.components:
                raise ValueError("the holdings must sum to the components' bytes")
        return self


class Timeline(Part):
    """Memory timeline: live bytes by component over one steady-state step, at selected instants."""

    ops: list[int] = Field(description="number of operators run since the step began")
    elapsed_s: list[float] | None = Field(description="time since then, including the instrument")
    phase: list[Phase]
    op: list[str | None] | None = optional("operator that ran last, null before the first one")
    components: dict[Component, list[Natural]]

    @model_validator(mode="after")
    def _refuse_ragged_columns(self) -> Self:
        columns = [self.phase, self.elapsed_s, self.op, *self.components.values()]
        if any(column is not None and len(column) != len(self.ops) for column in columns):
            raise ValueError("the columns of a timeline must be equally long")
        return self


class Allocator(Part):
    """PyTorch's CUDA caching allocator, simulated from the first allocation to a steady step."""

    requested_bytes: int = Field(description="peak of sizes as requested")
    allocated_bytes: int = Field(
        description="peak of whole blocks, as torch.cuda.max_memory_allocated counts"
    )
    reserved_bytes: int = Field(
        description="peak of segments, as torch.cuda.max_memory_reserved counts"
    )
    expandable_reserved_bytes: int = Field(
        description="the same with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    limit_bytes: int | None = Field(description="memory of the target that training can allocate")
    fits: bool | None = Field(
        description="whether every request finds room within the limit; null without a limit"
    )
    retries: int | None = Field(
        description="how often a steady step releases the cache to find room; null where it finds "
        "none"
    )
    settled: bool = Field(
        description="whether steps came to repeat without reserving more, within ten of them"
    )


class Attribution(Part):
    """How far the timeline is reconciled, and how owners were identified."""

    valid: bool | None = Field(description="whether the gap is within its bound")
    timeline_peak_bytes: int
    allocator_peak_bytes: int | None
    rounding_bytes: int = Field(
        0, description="what whole blocks take beyond the timeline's sizes, by simulation; CUDA"
    )
    gap_bytes: int | None = Field(
        description="the allocator's peak minus the timeline's and the rounding"
    )
    evidence: dict[Evidence, int] = Field(
        description="bytes at the peak by how their owner was identified; with unattributed "
        "they sum to the timeline's peak"
    )
    reason: str | None


class Compute(Part):
    """FLOPs of one steady-state step, of matrix products and attention if not stated otherwise."""

    model_flops: int | None = Field(
        description="FLOPs that the non-private step needs: 6 N + 12 L d T per token (PaLM, "
        "appendix B)"
    )
    executed_flops: int = Field(description="FLOPs of a step in matrix products and attention")
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

    bytes_read: int = Field(description="bytes that the operators of a step must read")
    bytes_written: int = Field(description="bytes that they must write")
    launches: int | None = optional("kernels that the operators of a step start")
    by_phase: dict[Phase, Moved]
    by_op_kind: dict[OpKind, Moved]
    by_module: dict[str, Moved]
    by_component: dict[Component, Moved]
    by_phase_and_op_kind: list[Work]
    arithmetic_intensity: float | None = Field(description="executed FLOPs over bytes moved")


class Exchange(Part):
    """Calls of one collective in one phase of a steady-state step, by one rank.

    Bytes are those of the ring algorithm, which sends the least: of S bytes on N ranks, an
    all-gather and a reduce-scatter send and receive S (N - 1) / N, an all-reduce twice that.
    """

    collective: str = Field(description="all-gather, reduce-scatter, all-reduce or broadcast")
    phase: Phase = Field(description="the phase")
    calls: int = Field(description="calls in a step")
    payload_bytes: int = Field(
        description="bytes gathered, scattered or reduced, as a whole: S, summed over calls"
    )
    bytes_each_way: int = Field(description="what a rank sends, and as much as it receives")


WORKSPACE_OF = "workspace of "  # what begins the keys of ``assumed`` that name an operator


def find_unknown_workspaces(assumed: Mapping[str, str]) -> dict[str, str]:
    """Return why operators may allocate and free more than is counted, by operator."""
    named = [(key.removeprefix(WORKSPACE_OF), key) for key in assumed]
    return {op: assumed[key] for op, key in named if op != key}


class Memory(Part):
    """Peaks of the steady state (the timed steps), and of the first step where it differs."""

    peak_allocated_bytes: Peak | None = optional("the allocator's peak in the steady state")
    first_step_peak_allocated_bytes: Peak | None = optional(
        "the allocator's peak in the first step"
    )
    peak_reserved_bytes: Peak | None = optional("most that the allocator reserved")
    peak_rss_bytes: Peak | None = optional(
        "largest resident memory of the whole process, including imports"
    )
    peak_device_used_bytes: int | None = optional(
        "device memory in use by all processes after the timed steps"
    )
    alloc_retries: int | None = optional("how often the allocator freed its cache to go on")
    snapshots: list[Snapshot] = Field(default_factory=list)
    at_peak: AtPeak | None = None
    timeline: Timeline | None = None
    attribution: Attribution | None = None
    allocator: Allocator | None = optional("CUDA alone")
    assumed: dict[str, str] = Field(
        default_factory=dict,
        description="what is assumed about the device, and why",
    )
