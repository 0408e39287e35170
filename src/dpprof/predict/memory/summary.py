"""Summarises a step for a result: peak memory, timeline, FLOPs and bytes moved."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.parallel import Parallel
from dpprof.experiments.config.target import Dtype, Target, ceiling_of
from dpprof.experiments.records.reconciliation import reconcile
from dpprof.experiments.records.step_costs import (
    WORKSPACE_OF,
    Allocator,
    AtPeak,
    Compute,
    Exchange,
    Holdings,
    Io,
    LiveAllocation,
    Memory,
    Moved,
    Timeline,
    Work,
    find_unknown_workspaces,
)
from dpprof.experiments.records.terms import (
    COMPONENTS,
    EVIDENCE,
    Component,
    Evidence,
    OpKind,
    Phase,
)
from dpprof.predict.flops.collectives import sum_exchanges
from dpprof.predict.flops.cost import COUNTED
from dpprof.predict.memory.allocator_replay import place, summarise_allocator
from dpprof.predict.memory.attention_backends import LOWER_BOUNDS
from dpprof.predict.memory.cpu_workspaces import explain_unknown
from dpprof.predict.memory.cuda_workspaces import UNKNOWN_WORKSPACES
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.streams import place as place_on_streams
from dpprof.predict.memory.timeline import LiveStorage, MemoryTimeline
from dpprof.private.norms.triton_ops import LAUNCHES

LARGEST_ALLOCATIONS = 15
"""How many groups of live storages at the peak a result lists."""

TIMELINE_POINTS = 300
"""A timeline is divided into this many equal parts; each keeps its highest instant."""

OUTSIDE_MODEL = "(outside the model)"


def state_memory(
    experiment: Experiment,
    first: MemoryTimeline,
    steady: MemoryTimeline,
    allocator_peak: int | None,
    *,
    real: bool,
    allocator: Allocator | None = None,
) -> Memory:
    """Summarise live memory at the peak of a step and over time.

    ``allocator_peak`` is that of the steady step in bytes, if it is known in this process; ``real``
    says whether the step ran, so that its times have a meaning; ``allocator`` is None for a CPU.
    """
    peak, first_peak, recorded_peak = steady.peak_bytes, first.peak_bytes, steady.peak_bytes
    if allocator is not None:
        peak, first_peak = allocator.allocated_bytes, _place_once(first)
        # Blocks are divided otherwise in later steps, and this one's peak was measured.
        recorded_peak = _place_once(steady) if real else peak
    assumed = _list_assumptions(steady, experiment.device)
    return Memory(
        peak_allocated_bytes=peak,
        first_step_peak_allocated_bytes=first_peak,
        peak_reserved_bytes=None if real or allocator is None else allocator.reserved_bytes,
        alloc_retries=None if real or allocator is None else allocator.retries,
        at_peak=_at_peak(steady),
        timeline=_timeline(steady, real=real),
        attribution=reconcile(
            experiment,
            steady.peak_bytes,
            allocator_peak,
            _sum_by_evidence(steady),
            recorded_peak - steady.peak_bytes,
            unknown=find_unknown_workspaces(assumed),
        ),
        allocator=allocator,
        assumed=assumed | (_of_ranks(experiment) if not real else {}),
    )


def _place_once(step: MemoryTimeline) -> int:
    """Return the allocator's peak of a step that runs once after all before it."""
    once = place(step.before, step.events, step.requested_bytes, most_steps=1)
    return once.peaks.allocated_bytes


def simulate_allocator(
    steady: MemoryTimeline, limit_bytes: int | None, *, as_graph: bool = False
) -> Allocator:
    """Play the training up to a step in the steady state, and that step, into the allocator."""
    training = (steady.before, steady.events, steady.requested_bytes)
    return summarise_allocator(partial(place, *training, as_graph=as_graph), limit_bytes)


def _of_ranks(experiment: Experiment) -> dict[str, str]:
    """Return the assumptions about several ranks on GPUs."""
    if experiment.parallel is None or experiment.device != "cuda":
        return {}
    return {
        "buffers of NCCL": "0 bytes: PyTorch's allocator does not know them",
        "streams of ranks": "one: FSDP's own streams have pools of their own, so more may be "
        "reserved",
    }


def _list_assumptions(step: MemoryTimeline, device: str) -> dict[str, str]:
    """Return the assumptions: choices for a device, and what operators may allocate beyond."""
    ran = {(op.cost.op, op.cost.dtype) for op in step.ops}
    if device == "cuda":
        explained = LOWER_BOUNDS | UNKNOWN_WORKSPACES
        reasons = ((op, explained.get(op)) for op, _ in sorted(ran))
    else:
        reasons = ((op, explain_unknown(op, dtype)) for op, dtype in sorted(ran))
    return {**step.notes, **{f"{WORKSPACE_OF}{op}": why for op, why in reasons if why}}


def _at_peak(step: MemoryTimeline) -> AtPeak:
    row = step.peak_row
    storage = step.peak_storage
    live = step.live_storages_at_peak()
    return AtPeak(
        components=dict(zip(COMPONENTS, step.balances[row].tolist(), strict=True)),
        phase=step.phases[row],
        module=storage and storage.module,
        op=storage and storage.op,
        largest=_list_largest(live),
        holdings=_list_holdings(live),
    )


def _list_holdings(live: Iterable[LiveStorage]) -> Holdings:
    """Sum what is live by component, layer, operator and phase, the largest first."""
    sizes: dict[tuple[Component, str | None, str, Phase], list[int]] = defaultdict(list)
    for storage, owner in live:
        layer = storage.layer or storage.module
        sizes[owner.component, layer, storage.op, storage.phase].append(storage.nbytes)
    groups = sorted(sizes.items(), key=lambda group: sum(group[1]), reverse=True)
    keys = [key for key, _ in groups]
    return Holdings(
        component=[component for component, _, _, _ in keys],
        layer=[layer for _, layer, _, _ in keys],
        op=[op for _, _, op, _ in keys],
        phase=[phase for _, _, _, phase in keys],
        bytes=[sum(group) for _, group in groups],
        storages=[len(group) for _, group in groups],
    )


def _list_largest(live: Iterable[LiveStorage]) -> list[LiveAllocation]:
    sizes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for storage, owner in live:
        key = (*owner, storage.op, storage.phase, storage.module, storage.function)
        sizes[key].append(storage.nbytes)
    names = ("component", "evidence", "op", "phase", "module", "function")
    groups = [
        LiveAllocation(bytes=sum(group), storages=len(group), **dict(zip(names, key, strict=True)))
        for key, group in sizes.items()
    ]
    return sorted(groups, key=lambda group: group.bytes, reverse=True)[:LARGEST_ALLOCATIONS]


def _timeline(step: MemoryTimeline, *, real: bool) -> Timeline:
    """Select the instants that a figure needs.

    These are the highest of each of equal parts of the step, the highest of each component, the
    first and last of each phase, and the first and last of the step.
    """
    totals, balances, phases = step.totals, step.balances, step.phases
    last = len(totals) - 1
    parts = np.array_split(np.arange(last + 1), min(TIMELINE_POINTS, last + 1))
    kept = {int(part[totals[part].argmax()]) for part in parts}
    kept |= {int(row) for row in balances.argmax(axis=0)} | {0, last}
    for row in range(1, last + 1):
        if phases[row] != phases[row - 1]:
            kept |= {row - 1, row}
    rows = sorted(kept)
    ran = [isinstance(event, Op) for event in step.events]
    ops = [0, *accumulate(ran)]
    names = [None, *(op.name for op in step.ops)]
    return Timeline(
        ops=[ops[row] for row in rows],
        op=[names[ops[row]] for row in rows],
        elapsed_s=_elapsed_s(step, rows) if real else None,
        phase=[phases[row] for row in rows],
        components={
            component: balances[rows, column].tolist()
            for column, component in enumerate(COMPONENTS)
            if balances[:, column].any()
        },
    )


def _elapsed_s(step: MemoryTimeline, rows: list[int]) -> list[float]:
    instants = [op.at_s for op in step.ops]
    start = instants[0]
    ran = 0
    elapsed = [0.0]
    for event in step.events:
        ran += isinstance(event, Op)
        elapsed.append(instants[max(ran - 1, 0)] - start)
    return [elapsed[row] for row in rows]


def _sum_by_evidence(step: MemoryTimeline) -> dict[Evidence, int]:
    sums = dict.fromkeys(EVIDENCE, 0)
    for storage, owner in step.live_storages_at_peak():
        if owner.evidence is not None:
            sums[owner.evidence] += storage.nbytes
    return sums


def state_compute(
    experiment: Experiment,
    model_flops: int | None,
    step: MemoryTimeline,
    ceilings: Target | None,
) -> Compute:
    """Summarise the FLOPs that a step executed and those that the model needs."""
    by_phase: Counter[Phase] = Counter()
    by_module: Counter[str] = Counter()
    by_component: Counter[Component] = Counter()
    other = 0
    for op in step.ops:
        if op.cost.family not in COUNTED:
            other += op.cost.flops
            continue
        by_phase[op.phase] += op.cost.flops
        by_module[op.module or OUTSIDE_MODEL] += op.cost.flops
        by_component[step.component_of(op.writes[0][0])] += op.cost.flops
    executed = by_phase.total()
    dtype: Dtype = experiment.dtype
    return Compute(
        model_flops=model_flops,
        executed_flops=executed,
        other_flops=other,
        flops_by_phase=dict(by_phase),
        flops_by_module=dict(by_module),
        flops_by_component=dict(by_component),
        dp_flop_multiplier=executed / model_flops if model_flops else None,
        mfu=None,
        hfu=None,
        peak_flops_per_s=ceilings and ceilings.peak(dtype),
        peak_source=ceilings and ceilings.source,
        roofline_step_s=ceilings and bound_step_s(step.ops, dtype, ceilings),
        reason=_explain_unknown(experiment, model_flops, ceilings, step),
    )


def _explain_unknown(
    experiment: Experiment,
    model_flops: int | None,
    ceilings: Target | None,
    step: MemoryTimeline,
) -> str | None:
    reasons = []
    counted = (op.cost for op in step.ops if op.cost.family in COUNTED)
    unpriced = sorted({cost.op for cost in counted if cost.formula_unknown})
    if unpriced:
        reasons.append(f"no formula is known for {', '.join(unpriced)}, which counts as 0")
    if model_flops is None:
        reasons.append(_explain_no_formula(experiment))
    if ceilings is None:
        reasons.append("the device's ceilings are not known")
    return "; ".join(reasons) or None


def _explain_no_formula(experiment: Experiment) -> str:
    if experiment.task != "causal-lm":
        padded = "of padded samples, model FLOPs are known for causal language models alone"
        return "a plain step cannot be counted" if experiment.padding is None else padded
    if isinstance(experiment.model, Architecture):
        return "the formula holds for no experts, no convolutions, and no layers without attention"
    return "the layers of another package's model are not known"


def bound_step_s(ops: Iterable[Op], dtype: Dtype, ceilings: Target) -> float:
    """Sum the lower bounds of each operator's time, by compute or by bandwidth.

    Williams et al. 2009, "Roofline". Operators run one after another, and each byte moves once. No
    step can be faster.
    """
    total = 0.0
    for op in ops:
        moved = sum(size for _, size in (*op.reads, *op.writes))
        bound = moved / ceilings.bandwidth_bytes_per_s
        if op.cost.family in COUNTED:
            peak = ceilings.peak(ceiling_of(op.cost.dtype, dtype))
            if peak is not None:
                bound = max(bound, op.cost.flops / peak)
        total += bound
    return total


def state_io(step: MemoryTimeline, executed_flops: int) -> Io:
    """Summarise the bytes that a step's operators had to read and write."""
    sums: dict[str, dict[Any, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for op in step.ops:
        keys = {
            "by_phase": op.phase,
            "by_op_kind": op.op_kind,
            "by_module": op.module or OUTSIDE_MODEL,
        }
        for way, sized in (("read", op.reads), ("written", op.writes)):
            for number, size in sized:
                keys["by_component"] = step.component_of(number)
                for name, key in keys.items():
                    sums[name][key][way] += size
    names = ("by_phase", "by_op_kind", "by_module", "by_component")
    moved: dict[str, Any] = {
        name: {
            key: Moved(read=ways["read"], written=ways["written"])
            for key, ways in sums[name].items()
        }
        for name in names
    }
    read = sum(ways["read"] for ways in sums["by_phase"].values())
    written = sum(ways["written"] for ways in sums["by_phase"].values())
    return Io(
        bytes_read=read,
        bytes_written=written,
        launches=sum(LAUNCHES.get(op.name, 1) for op in step.ops),
        by_phase_and_op_kind=_work(step),
        arithmetic_intensity=executed_flops / (read + written) if read + written else None,
        **moved,
    )


def _work(step: MemoryTimeline) -> list[Work]:
    groups: dict[tuple[Phase, OpKind], list[Op]] = defaultdict(list)
    for op in step.ops:
        groups[op.phase, op.op_kind].append(op)
    return [
        Work(
            phase=phase,
            op_kind=op_kind,
            ops=len(ops),
            flops=sum(op.cost.flops for op in ops),
            read=sum(size for op in ops for _, size in op.reads),
            written=sum(size for op in ops for _, size in op.writes),
        )
        for (phase, op_kind), ops in groups.items()
    ]


def state_communication(step: MemoryTimeline, parallel: Parallel | None) -> list[Exchange] | None:
    """Summarise a rank's exchanges in a step; None where there is one rank."""
    if parallel is None:
        return None
    placed = (spot.collective for spot in place_on_streams(step.ops, parallel))
    called = zip(placed, step.ops, strict=True)
    return sum_exchanges((call, op.phase) for call, op in called if call is not None)
