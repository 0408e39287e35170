"""Summarises a step for a result: peak memory, timeline, FLOPs and bytes moved."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import numpy as np

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.parallel import Parallel
from dpprof.experiments.config.target import Dtype, Target, ceiling_of
from dpprof.experiments.records import step_costs, terms
from dpprof.experiments.records.reconciliation import reconcile
from dpprof.predict.flops.cost import COUNTED
from dpprof.predict.memory.attention_backends import LOWER_BOUNDS
from dpprof.predict.memory.cpu_workspaces import explain_unknown
from dpprof.predict.memory.cuda_workspaces import UNKNOWN_WORKSPACES
from dpprof.predict.memory.events import Op, Storage
from dpprof.predict.memory.exchanges import place, sum_exchanges
from dpprof.predict.memory.owners import Owner
from dpprof.predict.memory.timeline import LiveStorage, MemoryTimeline
from dpprof.private.norms.triton_ops import LAUNCHES

LARGEST_ALLOCATIONS = 15  # how many groups of live storages at the peak a result lists

TIMELINE_POINTS = 300
"""A timeline is divided into this many equal parts; each keeps its highest instant."""

OUTSIDE_MODEL = "(outside the model)"

_OF_RANKS = {
    "buffers of NCCL": "0 bytes: PyTorch's allocator does not know them",
    "streams of ranks": "one: FSDP's own streams have pools of their own, so more may be reserved",
}
"""The assumptions about several ranks on GPUs."""


def state_memory(
    experiment: Experiment,
    first: MemoryTimeline,
    steady: MemoryTimeline,
    allocator_peak: int | None,
    *,
    real: bool,
    allocator: step_costs.Allocator | None = None,
) -> step_costs.Memory:
    """Summarise live memory at the peak of a step and over time.

    ``allocator_peak`` is that of the steady step in bytes, if it is known in this process; ``real``
    says whether the step ran, so that its times have a meaning; ``allocator`` is None for a CPU.
    """
    peak, first_peak, recorded_peak = steady.peak_bytes, first.peak_bytes, steady.peak_bytes
    if allocator is not None:
        peak = recorded_peak = allocator.allocated_bytes
        first_peak = first.footprint.place(most_steps=1).peaks.allocated_bytes
        if real:  # blocks are divided otherwise in later steps, and this one's peak was measured
            recorded_peak = steady.footprint.place(most_steps=1).peaks.allocated_bytes
    assumed = _list_assumptions(steady, experiment.device)
    of_ranks = experiment.parallel is not None and experiment.device == "cuda" and not real
    return step_costs.Memory(
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
            unknown=step_costs.find_unknown_workspaces(assumed),
        ),
        allocator=allocator,
        assumed=assumed | (_OF_RANKS if of_ranks else {}),
    )


def _list_assumptions(step: MemoryTimeline, device: str) -> dict[str, str]:
    """Return the assumptions: choices for a device, and what operators may allocate beyond."""
    ran = {(op.cost.op, op.cost.dtype) for op in step.ops}
    if device == "cuda":
        explained = LOWER_BOUNDS | UNKNOWN_WORKSPACES
        reasons = ((op, explained.get(op)) for op, _ in sorted(ran))
    else:
        reasons = ((op, explain_unknown(op, dtype)) for op, dtype in sorted(ran))
    return {**step.notes, **{f"{step_costs.WORKSPACE_OF}{op}": why for op, why in reasons if why}}


def _at_peak(step: MemoryTimeline) -> step_costs.AtPeak:
    row = step.peak_row
    storage = step.peak_storage
    return step_costs.AtPeak(
        components=dict(zip(terms.COMPONENTS, step.balances[row].tolist(), strict=True)),
        phase=step.phases[row],
        module=storage and storage.module,
        op=storage and storage.op,
        largest=_list_largest(step.live_at_peak),
        holdings=_list_holdings(step.live_at_peak),
    )


def _sum_live(
    live: Iterable[LiveStorage], key: Callable[[Storage, Owner], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], int, int]]:
    """Return the keys of live storages with their bytes and their number, the largest first."""
    sizes: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for storage, owner in live:
        sizes[key(storage, owner)].append(storage.nbytes)
    groups = [(name, sum(group), len(group)) for name, group in sizes.items()]
    return sorted(groups, key=lambda group: group[1], reverse=True)


def _list_holdings(live: Iterable[LiveStorage]) -> step_costs.Holdings:
    names = ("component", "layer", "op", "phase", "bytes", "storages")
    sums = _sum_live(live, lambda s, owner: (owner.component, s.layer or s.module, s.op, s.phase))
    rows = [(*values, nbytes, number) for values, nbytes, number in sums]
    columns: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return step_costs.Holdings(**columns)


def _list_largest(live: Iterable[LiveStorage]) -> list[step_costs.LiveAllocation]:
    names = ("component", "evidence", "op", "phase", "module", "function")
    sums = _sum_live(live, lambda s, owner: (*owner, s.op, s.phase, s.module, s.function))
    return [
        step_costs.LiveAllocation(
            bytes=nbytes, storages=number, **dict(zip(names, values, strict=True))
        )
        for values, nbytes, number in sums[:LARGEST_ALLOCATIONS]
    ]


def _timeline(step: MemoryTimeline, *, real: bool) -> step_costs.Timeline:
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
    ops = [0, *accumulate(isinstance(event, Op) for event in step.events)]
    ran = [event for event in step.events if isinstance(event, Op)]
    names = [None, *(op.name for op in ran)]
    instants = [op.at_s for op in ran]
    return step_costs.Timeline(
        ops=[ops[row] for row in rows],
        op=[names[ops[row]] for row in rows],
        elapsed_s=[instants[max(ops[row] - 1, 0)] - instants[0] for row in rows] if real else None,
        phase=[phases[row] for row in rows],
        components={
            component: balances[rows, column].tolist()
            for column, component in enumerate(terms.COMPONENTS)
            if balances[:, column].any()
        },
    )


def _sum_by_evidence(step: MemoryTimeline) -> dict[terms.Evidence, int]:
    sums = dict.fromkeys(terms.EVIDENCE, 0)
    for storage, owner in step.live_at_peak:
        if owner.evidence is not None:
            sums[owner.evidence] += storage.nbytes
    return sums


def state_compute(
    experiment: Experiment,
    model_flops: int | None,
    step: MemoryTimeline,
    ceilings: Target | None,
) -> step_costs.Compute:
    """Summarise the FLOPs that a step executed and those that the model needs."""
    by_phase: Counter[terms.Phase] = Counter()
    by_module: Counter[str] = Counter()
    by_component: Counter[terms.Component] = Counter()
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
    return step_costs.Compute(
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
    return "the formula is of transformers, and the layers of this model are not known"


def bound_step_s(ops: Iterable[Op], dtype: Dtype, ceilings: Target) -> float:
    """Sum the lower bounds of each operator's time, by compute or by bandwidth.

    Williams et al. 2009, "Roofline". Operators run one after another, and each byte moves once. No
    step can be faster.
    """
    total = 0.0
    for op in ops:
        bound = op.moved_bytes / ceilings.bandwidth_bytes_per_s
        if op.cost.family in COUNTED:
            peak = ceilings.peak(ceiling_of(op.cost.dtype, dtype))
            if peak is not None:
                bound = max(bound, op.cost.flops / peak)
        total += bound
    return total


def state_io(step: MemoryTimeline, executed_flops: int) -> step_costs.Io:
    """Summarise the bytes that a step's operators had to read and write."""
    names = ("by_phase", "by_op_kind", "by_module", "by_component")
    sums: dict[str, dict[Any, dict[str, int]]] = {
        name: defaultdict(lambda: {"read": 0, "written": 0}) for name in names
    }
    work: dict[tuple[terms.Phase, terms.OpKind], Counter[str]] = defaultdict(Counter)
    for op in step.ops:
        work[op.phase, op.op_kind].update(ops=1, flops=op.cost.flops)
        for way, sized in (("read", op.reads), ("written", op.writes)):
            work[op.phase, op.op_kind][way] += sum(size for _, size in sized)
            for number, size in sized:
                module, component = op.module or OUTSIDE_MODEL, step.component_of(number)
                for name, key in zip(names, (op.phase, op.op_kind, module, component), strict=True):
                    sums[name][key][way] += size
    moved: dict[str, Any] = {
        name: {key: step_costs.Moved(**ways) for key, ways in groups.items()}
        for name, groups in sums.items()
    }
    read, written = (sum(each[way] for each in work.values()) for way in ("read", "written"))
    return step_costs.Io(
        bytes_read=read,
        bytes_written=written,
        launches=sum(LAUNCHES.get(op.name, 1) for op in step.ops),
        by_phase_and_op_kind=[
            step_costs.Work(phase=phase, op_kind=op_kind, **each)
            for (phase, op_kind), each in work.items()
        ],
        arithmetic_intensity=executed_flops / (read + written) if read + written else None,
        **moved,
    )


def state_communication(
    step: MemoryTimeline, parallel: Parallel | None
) -> list[step_costs.Exchange] | None:
    """Summarise a rank's exchanges in a step; None where there is one rank."""
    if parallel is None:
        return None
    placed = (spot.collective for spot in place(step.ops, parallel))
    called = zip(placed, step.ops, strict=True)
    return sum_exchanges((call, op.phase) for call, op in called if call is not None)
