"""Reconciliation: compares the recorded peak with the allocator's."""

from collections.abc import Iterable, Mapping

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.step_costs import Attribution
from dpprof.experiments.records.terms import Evidence
from dpprof.private.number_formats import SHORT

JOINED = "joined in tables"  # the reason of a null figure that needs the result of another process
SMALL_CHANGE_BYTES = 64 * 2**10  # a gap of this size is within bounds for a peak of any size


def bound_bytes(experiment: Experiment, allocator_peak_bytes: int) -> int:
    """Return the largest gap that counts as reconciled.

    It is 0.1 % of the allocator's peak; 0.5 % in 16 bits, whose products need scratch memory that
    depends on the processor, and on CUDA, where libraries allocate too.
    """
    share = 0.005 if experiment.device == "cuda" or experiment.dtype in SHORT else 0.001
    return max(SMALL_CHANGE_BYTES, int(share * allocator_peak_bytes))


def reconcile(
    experiment: Experiment,
    timeline_peak_bytes: int,
    allocator_peak_bytes: int | None,
    evidence: Mapping[Evidence, int],
    rounding_bytes: int = 0,
    *,
    unknown: Iterable[str] = (),
) -> Attribution:
    """Return how the recorded peak compares with the allocator's, if the latter is known.

    On CUDA the allocator's peak counts whole blocks, as ``max_memory_allocated`` does;
    ``rounding_bytes`` is what they take beyond the timeline's sizes. ``unknown`` names operators
    that may allocate and free more than was recorded, as a reason then does.
    """
    gap: int | None = None
    valid: bool | None = None
    reason: str | None = JOINED
    if allocator_peak_bytes is not None:
        gap = allocator_peak_bytes - timeline_peak_bytes - rounding_bytes
        bound = bound_bytes(experiment, allocator_peak_bytes)
        valid = abs(gap) <= bound
        reason = None if valid else f"the gap of {gap:,} bytes exceeds its bound of {bound:,}"
    named = ", ".join(unknown)
    if reason and named:
        reason = f"{reason}; not all workspaces are known, of {named}"
    return Attribution(
        valid=valid,
        timeline_peak_bytes=timeline_peak_bytes,
        allocator_peak_bytes=allocator_peak_bytes,
        rounding_bytes=rounding_bytes,
        gap_bytes=gap,
        evidence=dict(evidence),
        reason=reason,
    )
