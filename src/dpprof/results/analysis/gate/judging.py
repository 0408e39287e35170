"""Whether one figure of a run is worse on the candidate's side than on the baseline's.

Most figures of a result are exact: equal runs have equal ones, without noise. Step times are not.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from decimal import Decimal
from statistics import median, median_low
from typing import Any, Literal, NamedTuple

from dpprof.experiments.config.target import device_of
from dpprof.experiments.records.comparison import (
    ComparedFigure,
    FigureName,
    Judgement,
    Metric,
    Thresholds,
    TimeStatistics,
)
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.terms import OUTCOMES
from dpprof.results.analysis.groups import ExperimentRuns
from dpprof.results.analysis.statistics import NO_DIFFERENCE, Comparison, can_differ

Number = int | float
_MORE_IS_BETTER = {"fits", "largest batch", "largest safe batch"}


class RunKey(NamedTuple):
    """Which replicates belong together."""

    experiment_id: str
    instrument: str


class ExactFigure(NamedTuple):
    """A figure that any run of an instrument has."""

    metric: Metric
    figure: FigureName
    unit: Literal["bytes", "FLOPs", "launches", "samples", "seconds"] | None = "bytes"
    part: str | None = None
    phase: str | None = None


class FamilyKey(NamedTuple):
    """What a family is of."""

    name: str
    batch_size: int | None = None  # that a capacity found, and of which it states the family


def list_families(
    result: Result, metrics: Container[Metric]
) -> dict[FamilyKey, dict[ExactFigure, Number]]:
    """Return the exact figures of a result by family; none of a run that failed.

    Those of a family are known together; one that is absent is 0.

    Resident memory and the bytes that a real allocator reserves are not exact, so they are not
    among them.
    """
    families: dict[FamilyKey, dict[ExactFigure, Number]] = defaultdict(dict)
    stated = None if result.capacity is None else result.capacity.stated_batch_size
    for family, figure, value in _exact_figures(result) if result.outcome == "ok" else ():
        if value is not None and figure.metric in metrics:
            of = None if family == "largest batches" else stated
            families[FamilyKey(family, of)][figure] = value
    return dict(families)


def _exact_figures(result: Result) -> Iterator[tuple[str, ExactFigure, Number | None]]:
    """Yield every exact figure with the name of its family; None where it is unknown."""
    if (capacity := result.capacity) is not None:
        batch = ExactFigure("memory", "largest batch", "samples")
        safe = batch._replace(figure="largest safe batch")
        yield "largest batches", batch, capacity.batch_size
        yield "largest batches", safe, capacity.safe_batch_size or 0
    if (memory := result.memory) is not None:
        peaks: dict[FigureName, int | None] = {
            "peak": memory.peak_allocated_bytes,
            "peak of the first step": memory.first_step_peak_allocated_bytes,
        }
        if (simulated := memory.allocator) is not None:
            fits = None if simulated.fits is None else int(simulated.fits)
            yield "fits", ExactFigure("memory", "fits", None), fits
            peaks["reserved"] = simulated.reserved_bytes
            peaks["reserved with expandable segments"] = simulated.expandable_reserved_bytes
        for name, size in peaks.items():
            yield name, ExactFigure("memory", name), size
        held = memory.at_peak.components if memory.at_peak else {}
        for component, size in held.items():
            yield "components", ExactFigure("memory", "component", part=component), size
    yield from _work(result)
    target, time = result.experiment.target, result.time
    # The predicted time for a CPU rests on times measured on it, so it is not exact.
    if target is not None and device_of(target) != "cpu" and time and time.predicted_step_s:
        figure = ExactFigure("time", "predicted step time", "seconds")
        yield "predicted step time", figure, time.predicted_step_s.median


def _work(result: Result) -> Iterator[tuple[str, ExactFigure, int | None]]:
    if (compute := result.compute) is not None:
        flops: dict[FigureName, int | None] = {
            "executed FLOPs": compute.executed_flops,
            "other FLOPs": compute.other_flops,
            "model FLOPs": compute.model_flops,
        }
        for name, count in flops.items():
            yield "FLOPs", ExactFigure("flops", name, "FLOPs"), count
    if (io := result.io) is not None:
        moved = ExactFigure("flops", "bytes moved")
        yield "operators", moved, io.bytes_read + io.bytes_written
        yield "operators", ExactFigure("launches", "launches", "launches"), io.launches
        for work in io.by_phase_and_op_kind:
            kind, phase, size = work.op_kind, work.phase, work.read + work.written
            yield "operators", ExactFigure("flops", "FLOPs", "FLOPs", kind, phase), work.flops
            yield "operators", moved._replace(part=kind, phase=phase), size
    for exchange in result.communication or ():
        figure = ExactFigure("flops", "bytes sent", "bytes", exchange.collective, exchange.phase)
        yield "communication", figure, exchange.bytes_each_way


def judge_outcomes(
    key: RunKey, baseline: Sequence[Result], candidate: Sequence[Result]
) -> ComparedFigure:
    """Compare how runs ended: worse is a larger share of replicates that failed."""
    failed = [[r for r in side if r.outcome != "ok"] for side in (baseline, candidate)]
    ended = []
    for side in (baseline, candidate):
        counts = Counter(result.outcome for result in side)
        each = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if name in counts)
        ended.append(each if len(counts) > 1 else side[0].outcome)
    was, now = len(failed[0]) * len(candidate), len(failed[1]) * len(baseline)
    judgement: Judgement = "worse" if now > was else "better" if now < was else "same"
    reason = None
    if judgement == "same" and {r.outcome for r in failed[0]} != {r.outcome for r in failed[1]}:
        judgement, reason = "undecided", "failed on both sides, in different ways"
    if judgement == "worse":
        error = failed[1][0].error
        reason = None if error is None else error.message
    return ComparedFigure(
        **key._asdict(),
        metric="outcome",
        figure="outcome",
        baseline=ended[0],
        candidate=ended[1],
        judgement=judgement,
        reason=reason,
    )


def judge_exact(
    key: RunKey,
    figure: ExactFigure,
    baseline: Sequence[Number] | None,
    candidate: Sequence[Number] | None,
    thresholds: Thresholds,
) -> ComparedFigure:
    """Compare a figure without noise; where replicates differ, their ranges must lie apart.

    Nothing is decided of a figure that is None on one side: not known there.
    """
    if candidate is None:
        value = median_low(baseline or ())
        return _compare(key, figure, value, None, reason="known in the baseline alone")
    now = median_low(candidate)
    if baseline is None:
        return _compare(key, figure, None, now, reason="known in the candidate alone")
    was, reason = median_low(baseline), None
    threshold = _find_threshold(figure, thresholds)
    judgement: Judgement
    if set(baseline) == set(candidate):
        judgement = "same"
    elif max(candidate) < min(baseline) or min(candidate) > max(baseline):
        gets_worse = (now < was) if figure.figure in _MORE_IS_BETTER else (now > was)
        judgement = "worse" if gets_worse else "better"
        change, share = Decimal(now) - Decimal(was), Decimal(repr(threshold))  # without rounding
        if gets_worse and abs(change) <= share * Decimal(was):
            judgement = "within threshold"
    else:
        judgement = "undecided"
        reason = f"replicates differ: {_format_range(baseline)} and {_format_range(candidate)}"
    decided = {"threshold": threshold, "judgement": judgement, "reason": reason}
    return _compare(key, figure, was, now, **decided)


def _find_threshold(figure: ExactFigure, thresholds: Thresholds) -> float:
    if figure.metric == "memory":
        fallback = 0.0 if figure.figure == "fits" else thresholds.memory
        return thresholds.components.get(figure.part or "", fallback)
    if figure.figure in ("bytes moved", "bytes sent"):
        return thresholds.bytes_moved
    return float(getattr(thresholds, figure.metric))


def _format_range(values: Sequence[Number]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _compare(
    key: RunKey,
    figure: ExactFigure,
    baseline: Number | None,
    candidate: Number | None,
    **decided: Any,
) -> ComparedFigure:
    """Return both sides' values of a figure, of which nothing is decided by itself."""
    ratio = candidate / baseline if baseline and candidate is not None else None
    values: dict[str, Any] = {"baseline": baseline, "candidate": candidate, "ratio": ratio}
    values["judgement"] = "undecided"
    return ComparedFigure(**key._asdict(), **figure._asdict(), **values | decided)


def judge_step_times(
    key: RunKey,
    groups: tuple[ExperimentRuns, ExperimentRuns],
    comparison: Comparison,
    threshold: float,
    reason: str | None = None,
) -> ComparedFigure:
    """Judge step times over processes, with regard to the noise.

    A step is slower where the report's verdict says so, the bootstrap interval of the ratio lies
    above 1, and the ratio is beyond the threshold. Groups are the run's processes, the baseline's
    first; ``reason`` says why there is no verdict, whatever the times are.
    """
    counts = len(groups[0].step_s), len(groups[1].step_s)
    if reason is None and not can_differ(*counts):
        enough = f"{counts[0]} and {counts[1]}, and 4 on each side are enough"
        reason = f"not enough replicates: {enough}"
    interval = comparison.interval
    statistics = TimeStatistics(
        baseline_processes=counts[0],
        candidate_processes=counts[1],
        ratio_low=interval and interval.low,
        ratio_high=interval and interval.high,
        p_value=comparison.p_value,
        noise_floor=comparison.floor,
    )
    was, now = (float(median(group.step_s)) for group in groups)
    return _compare(
        key,
        ExactFigure("time", "step time", "seconds"),
        was,
        now,
        ratio=comparison.ratio,
        threshold=threshold,
        judgement="undecided" if reason else _judge_ratio(comparison, threshold),
        reason=reason,
        statistics=statistics,
    )


def _judge_ratio(comparison: Comparison, threshold: float) -> Judgement:
    if comparison.verdict in (None, NO_DIFFERENCE) or comparison.interval is None:
        return "same"
    if comparison.interval.low <= 1 <= comparison.interval.high:
        return "same"
    if max(comparison.ratio, 1 / comparison.ratio) <= 1 + threshold:
        return "within threshold"
    return "worse" if comparison.ratio > 1 else "better"
