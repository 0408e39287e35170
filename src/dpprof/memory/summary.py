"""What a result says of a step: the peak of memory, its timeline, FLOPs and bytes moved."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
from torch import nn

from dpprof.flops.model_flops import model_flops_per_token
from dpprof.flops.op_costs import COUNTED
from dpprof.memory.attention_backends import LEAST
from dpprof.memory.recorder import Op
from dpprof.memory.timeline import Holding, MemoryTimeline
from dpprof.models.build import find_dimensions
from dpprof.records.reconciliation import reconcile
from dpprof.records.step_costs import AtPeak, Compute, Held, Io, Memory, Moved, Timeline, Work
from dpprof.records.terms import COMPONENTS, EVIDENCE, Component, Evidence, OpKind, Phase
from dpprof.spec.experiment import Experiment
from dpprof.spec.target import Dtype, Target

LARGEST = 15
"""So many holdings at the peak are listed one by one."""

TIMELINE_POINTS = 300
"""So many equal parts a timeline is divided into; each keeps its highest instant."""

OUTSIDE = "(outside the model)"


def state_memory(
    experiment: Experiment,
    first: MemoryTimeline,
    steady: MemoryTimeline,
    allocator_peak: int | None,
    *,
    real: bool,
) -> Memory:
    """Say what was alive in a step, at its peak and over time.

    Args:
        experiment: Whose steps they were.
        first: The first step.
        steady: A step in the steady state.
        allocator_peak: The allocator's peak of that step, where this process knows it.
        real: Whether the step really ran, so that its instants mean something.
    """
    return Memory(
        peak_allocated_bytes=steady.peak_bytes,
        first_step_peak_allocated_bytes=first.peak_bytes,
        at_peak=_at_peak(steady),
        timeline=_timeline(steady, real=real),
        attribution=reconcile(
            experiment, steady.peak_bytes, allocator_peak, _weigh_evidence(steady)
        ),
        assumed=_tell_assumed(steady),
    )


def _tell_assumed(step: MemoryTimeline) -> dict[str, str]:
    """Say what is taken for granted: choices of a device, and workspaces at their least."""
    ran = {op.cost.op for op in step.ops}
    least = {f"workspace of {op}": why for op, why in LEAST.items() if op in ran}
    return {**step.notes, **least}


def _at_peak(step: MemoryTimeline) -> AtPeak:
    row = step.peak_row
    storage = step.peak_storage
    return AtPeak(
        components=dict(zip(COMPONENTS, step.balances[row].tolist(), strict=True)),
        phase=step.phases[row],
        module=storage and storage.module,
        op=storage and storage.op,
        largest=_largest(step.holdings_at_peak()),
    )


def _largest(holdings: Iterable[Holding]) -> list[Held]:
    alike: dict[tuple[object, ...], list[Holding]] = defaultdict(list)
    for holding in holdings:
        born = holding.storage
        key = (*holding.owner, born.op, born.phase, born.module, born.function)
        alike[key].append(holding)
    held = [
        Held(
            component=group[0].owner.component,
            evidence=group[0].owner.evidence,
            bytes=sum(holding.storage.nbytes for holding in group),
            storages=len(group),
            op=group[0].storage.op,
            phase=group[0].storage.phase,
            module=group[0].storage.module,
            function=group[0].storage.function,
        )
        for group in alike.values()
    ]
    return sorted(held, key=lambda one: one.bytes, reverse=True)[:LARGEST]


def _timeline(step: MemoryTimeline, *, real: bool) -> Timeline:
    """Keep the instants that a picture needs: no component's maximum is lost.

    Those are the highest of each of equal parts of the step, each component's highest,
    each phase's first and last, and the step's ends.
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
    return Timeline(
        ops=[ops[row] for row in rows],
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


def _weigh_evidence(step: MemoryTimeline) -> dict[Evidence, int]:
    weights = dict.fromkeys(EVIDENCE, 0)
    for holding in step.holdings_at_peak():
        if holding.owner.evidence is not None:
            weights[holding.owner.evidence] += holding.storage.nbytes
    return weights


def state_compute(
    experiment: Experiment, module: nn.Module, step: MemoryTimeline, ceilings: Target | None
) -> Compute:
    """Say how many FLOPs a step executed, and how many it had to.

    Args:
        experiment: Whose step it was.
        module: The model, as the step trained it.
        step: A step in the steady state.
        ceilings: The device's limits, where they are known.
    """
    by_phase: Counter[Phase] = Counter()
    by_module: Counter[str] = Counter()
    by_component: Counter[Component] = Counter()
    other = 0
    for op in step.ops:
        if op.cost.family not in COUNTED:
            other += op.cost.flops
            continue
        by_phase[op.phase] += op.cost.flops
        by_module[op.module or OUTSIDE] += op.cost.flops
        by_component[step.component_of(op.writes[0][0])] += op.cost.flops
    executed = by_phase.total()
    model_flops = count_model_flops(experiment, module)
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
        peak_flops_per_s=ceilings and ceilings.flops_per_s.get(dtype),
        peak_source=ceilings and ceilings.source,
        roofline_step_s=ceilings and bound_step_s(step.ops, dtype, ceilings),
        reason=_why_unknown(model_flops, ceilings, step),
    )


def _why_unknown(
    model_flops: int | None, ceilings: Target | None, step: MemoryTimeline
) -> str | None:
    said = []
    counted = (op.cost for op in step.ops if op.cost.family in COUNTED)
    unpriced = sorted({cost.op for cost in counted if cost.formula_unknown})
    if unpriced:
        said.append(f"no formula is known for {', '.join(unpriced)}, which counts as 0")
    if model_flops is None:
        said.append("the layers of another package's model are not known")
    if ceilings is None:
        said.append("the device's ceilings are not known")
    return "; ".join(said) or None


def count_model_flops(experiment: Experiment, module: nn.Module) -> int | None:
    """Count what the non-private step has to compute; None for a model of another package."""
    dimensions = find_dimensions(experiment)
    if dimensions is None:
        return None
    seq_len = experiment.seq_len
    per_token = model_flops_per_token(
        module, seq_len=seq_len, layers=dimensions.layers, d_model=dimensions.d_model
    )
    return experiment.batch_size * seq_len * per_token


_CEILING: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "bfloat16", "float64": "float64"}


def bound_step_s(ops: Iterable[Op], dtype: Dtype, ceilings: Target) -> float:
    """Add up the least time of each operator: what binds it is compute or bandwidth.

    Williams et al. 2009, "Roofline". Operators one after another, each byte moved once; no
    step can be faster, and how much slower it is depends on kernels and launches.
    """
    total = 0.0
    for op in ops:
        moved = sum(size for _, size in (*op.reads, *op.writes))
        least = moved / ceilings.bandwidth_bytes_per_s
        if op.cost.family in COUNTED:
            in_float32: Dtype = "tf32" if dtype == "tf32" else "float32"
            peak = ceilings.flops_per_s.get(_CEILING.get(op.cost.dtype, in_float32))
            if peak is not None:
                least = max(least, op.cost.flops / peak)
        total += least
    return total


def state_io(step: MemoryTimeline, executed_flops: int) -> Io:
    """Say how many bytes a step's operators had to read and write."""
    tallies = {name: _Tally() for name in ("phase", "op_kind", "module", "component")}
    for op in step.ops:
        keys = {
            "phase": op.phase,
            "op_kind": op.op_kind,
            "module": op.module or OUTSIDE,
        }
        for way, sized in (("read", op.reads), ("written", op.writes)):
            for number, size in sized:
                for name, key in (*keys.items(), ("component", step.component_of(number))):
                    tallies[name].add(key, way, size)
    read, written = tallies["phase"].total("read"), tallies["phase"].total("written")
    return Io(
        bytes_read=read,
        bytes_written=written,
        by_phase=tallies["phase"].moved,
        by_op_kind=tallies["op_kind"].moved,
        by_module=tallies["module"].moved,
        by_component=tallies["component"].moved,
        by_phase_and_op_kind=_work(step),
        arithmetic_intensity=executed_flops / (read + written) if read + written else None,
    )


def _work(step: MemoryTimeline) -> list[Work]:
    alike: dict[tuple[Phase, OpKind], list[Op]] = defaultdict(list)
    for op in step.ops:
        alike[op.phase, op.op_kind].append(op)
    return [
        Work(
            phase=phase,
            op_kind=op_kind,
            ops=len(ops),
            flops=sum(op.cost.flops for op in ops),
            read=sum(size for op in ops for _, size in op.reads),
            written=sum(size for op in ops for _, size in op.writes),
        )
        for (phase, op_kind), ops in alike.items()
    ]


class _Tally:
    """Bytes read and written, by some key."""

    def __init__(self) -> None:
        self._sums: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, key: str, way: str, size: int) -> None:
        """Add bytes that were read or written."""
        self._sums[key][way] += size

    def total(self, way: str) -> int:
        """Return all that was read, or all that was written."""
        return sum(sums[way] for sums in self._sums.values())

    @property
    def moved(self) -> dict[Any, Moved]:
        """What was read and written, by key."""
        return {
            key: Moved(read=sums["read"], written=sums["written"])
            for key, sums in self._sums.items()
        }
