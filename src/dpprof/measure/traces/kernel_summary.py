"""Summarises a trace for a result: time by op kind and phase, and idle time."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from dpprof.experiments.records.result import Copied, Kernel, Launched
from dpprof.experiments.records.terms import OP_KINDS, PHASES
from dpprof.measure.traces.launching_ops import Ran, attribute
from dpprof.measure.traces.trace_files import Trace, cover_s, find_steps

LARGEST_KERNELS = 15  # the number of kernels that are listed individually


class NoKernelsError(ValueError):
    """The trace of a GPU's work has no kernels."""


def state_kernels(trace: Trace, *, on_cuda: bool) -> dict[str, Any]:
    """Return the fields of ``Kernels`` for the traced steps, except those about the trace's file.

    Each traced step waits at its end for the kernels that it launched.

    Raises:
        NoKernelsError: The steps have no GPU kernel, because the tracer, CUPTI, recorded none.
        ValueError: The trace has no step, or nothing ran in its steps.
    """
    steps = find_steps(trace)
    recorded = attribute(trace, on_cuda=on_cuda)
    ran = [ran for ran in recorded if any(start <= ran.launched_s <= end for start, end in steps)]
    if steps and on_cuda and not ran:
        raise NoKernelsError(
            "the trace has no GPU kernel; PyTorch's profiler sees only the host where CUPTI cannot "
            "trace (because only administrators may use it, or because another tracer is running)"
        )
    if not ran:
        raise ValueError("the trace shows no step in which anything ran")
    count = len(steps)
    total_s = _seconds(ran) / count
    by_op_kind = _sum_by(ran, count, attrgetter("op_kind"))
    by_phase = _sum_by(ran, count, attrgetter("phase"))
    spans = [(kernel.start_s, kernel.end_s) for kernel in ran]
    idle_s = [
        end - start - cover_s([(max(began, start), min(ended, end)) for began, ended in spans])
        for start, end in steps
    ]
    return {
        "steps": count,
        "step_s": sum(end - start for start, end in steps) / count,
        "total_s": total_s,
        "by_op_kind": {name: by_op_kind[name] for name in OP_KINDS if name in by_op_kind},
        "by_phase": {name: by_phase[name] for name in PHASES if name in by_phase},
        "by_phase_and_op_kind": [
            Launched(phase=phase, op_kind=op_kind, **_per_step(some, count))
            for (phase, op_kind), some in _group(ran, attrgetter("phase", "op_kind")).items()
        ],
        "other_share": by_op_kind.get("other", 0.0) / total_s,
        "idle_s": sum(idle_s) / count,
        "waiting_s": _waiting_s(ran, steps) / count if on_cuda else None,
        "largest": _largest(ran, count),
        "copies": _copies(ran, count) if on_cuda else {},
    }


def _waiting_s(ran: Sequence[Ran], steps: Sequence[tuple[float, float]]) -> float:
    """Return the sum of the gaps that the host caused by launching the next kernel too late."""
    waited = 0.0
    for start, end in steps:
        until = start
        for kernel in (kernel for kernel in ran if start <= kernel.launched_s <= end):
            if kernel.start_s > until and kernel.launched_s > until:
                waited += kernel.start_s - until
            until = max(until, kernel.end_s)
    return waited


def _sum_by(ran: Sequence[Ran], steps: int, key: Callable[[Ran], Any]) -> dict[Any, float]:
    return {name: _seconds(some) / steps for name, some in _group(ran, key).items()}


def _group(ran: Sequence[Ran], key: Callable[[Ran], Any]) -> dict[Any, list[Ran]]:
    alike: dict[Any, list[Ran]] = defaultdict(list)
    for kernel in ran:
        alike[key(kernel)].append(kernel)
    return alike


def _seconds(ran: Sequence[Ran]) -> float:
    return sum(kernel.end_s - kernel.start_s for kernel in ran)


def _per_step(ran: Sequence[Ran], steps: int) -> dict[str, float]:
    return {"seconds": _seconds(ran) / steps, "launches": len(ran) / steps}


def _largest(ran: Sequence[Ran], steps: int) -> list[Kernel]:
    alike = _group(ran, attrgetter("name", "op", "phase", "op_kind"))
    kernels = [
        Kernel(name=name, op=op, phase=phase, op_kind=op_kind, **_per_step(some, steps))
        for (name, op, phase, op_kind), some in alike.items()
    ]
    return sorted(kernels, key=attrgetter("seconds"), reverse=True)[:LARGEST_KERNELS]


def _copies(ran: Sequence[Ran], steps: int) -> dict[str, Copied]:
    """Return copies by direction, such as ``HtoD`` of ``Memcpy HtoD (Pageable -> Device)``."""
    copies = [copy for copy in ran if copy.name.startswith("Memcpy ")]
    return {
        direction: Copied(
            bytes=sum(copy.bytes for copy in some) / steps,
            seconds=_seconds(some) / steps,
            copies=len(some) / steps,
        )
        for direction, some in _group(copies, lambda copy: copy.name.split()[1]).items()
    }
