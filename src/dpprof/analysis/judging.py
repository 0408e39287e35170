"""Whether one figure of a run is worse on the candidate's side than on the baseline's."""

from collections.abc import Sequence
from decimal import Decimal
from statistics import median, median_low

from dpprof.analysis.exact_figures import Figure
from dpprof.analysis.groups import Group
from dpprof.analysis.results_folder import RunKey
from dpprof.analysis.statistics import NO_DIFFERENCE, Comparison, can_differ
from dpprof.records.comparison import ComparedFigure, Judgement, TimeStatistics
from dpprof.records.result import Result
from dpprof.records.terms import OUTCOMES
from dpprof.records.thresholds import Thresholds

Number = int | float


def judge_outcomes(
    key: RunKey, baseline: Sequence[Result], candidate: Sequence[Result]
) -> ComparedFigure:
    """Compare how runs ended: worse is a larger share of replicates that failed."""
    failed = [[r for r in side if r.outcome != "ok"] for side in (baseline, candidate)]
    told = [_spell_outcomes(side) for side in (baseline, candidate)]
    was, now = len(failed[0]) * len(candidate), len(failed[1]) * len(baseline)
    judgement: Judgement = "worse" if now > was else "better" if now < was else "same"
    reason = None
    if judgement == "same" and {r.outcome for r in failed[0]} != {r.outcome for r in failed[1]}:
        judgement, reason = "undecided", "failed on both sides, in different ways"
    if judgement == "worse":
        error = failed[1][0].error
        reason = None if error is None else error.message
    return ComparedFigure(
        experiment_id=key[0],
        instrument=key[1],
        metric="outcome",
        figure="outcome",
        baseline=told[0],
        candidate=told[1],
        judgement=judgement,
        reason=reason,
    )


def _spell_outcomes(results: Sequence[Result]) -> str:
    outcomes = [result.outcome for result in results]
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in OUTCOMES if one in outcomes)


def judge_exact(
    key: RunKey,
    figure: Figure,
    baseline: Sequence[Number],
    candidate: Sequence[Number],
    thresholds: Thresholds,
) -> ComparedFigure:
    """Compare a figure without noise; where replicates differ, their ranges must lie apart."""
    threshold = find_threshold(figure, thresholds)
    reason = None
    was, now = median_low(baseline), median_low(candidate)
    judgement: Judgement
    if set(baseline) == set(candidate):
        judgement = "same"
    elif max(candidate) < min(baseline) or min(candidate) > max(baseline):
        gets_worse = (now < was) if figure.more_is_better else (now > was)
        judgement = "worse" if gets_worse else "better"
        if gets_worse and _is_within(was, now, threshold):
            judgement = "within threshold"
    else:
        judgement = "undecided"
        reason = f"replicates differ: {_spell_range(baseline)} and {_spell_range(candidate)}"
    return _state(key, figure, was, now).model_copy(
        update={"threshold": threshold, "judgement": judgement, "reason": reason}
    )


def find_threshold(figure: Figure, thresholds: Thresholds) -> float:
    """Return the threshold of a figure, as a share of the baseline."""
    if figure.metric == "memory":
        fallback = 0.0 if figure.name == "fits" else thresholds.memory
        return thresholds.components.get(figure.part or "", fallback)
    if figure.metric == "time":
        return thresholds.time
    is_bytes = figure.name in ("bytes moved", "bytes sent")
    return thresholds.bytes_moved if is_bytes else thresholds.flops


def _is_within(was: Number, now: Number, threshold: float) -> bool:
    """Return whether a difference is at most a share of the baseline, without rounding."""
    share = Decimal(repr(threshold))
    return abs(Decimal(now) - Decimal(was)) <= share * Decimal(was)


def _spell_range(values: Sequence[Number]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def tell_missing(
    key: RunKey, figure: Figure, values: Sequence[Number], *, in_baseline: bool
) -> ComparedFigure:
    """State a figure that only one side knows."""
    value, side = median_low(values), "baseline" if in_baseline else "candidate"
    stated = _state(key, figure, value if in_baseline else None, None if in_baseline else value)
    return stated.model_copy(update={"reason": f"known in the {side} alone"})


def _state(
    key: RunKey, figure: Figure, baseline: Number | None, candidate: Number | None
) -> ComparedFigure:
    known = baseline and candidate is not None
    return ComparedFigure(
        experiment_id=key[0],
        instrument=key[1],
        metric=figure.metric,
        figure=figure.name,
        part=figure.part,
        phase=figure.phase,
        unit=figure.unit,
        baseline=baseline,
        candidate=candidate,
        ratio=candidate / baseline if known else None,  # type: ignore[operator]
        judgement="undecided",
    )


def judge_step_times(
    key: RunKey,
    groups: tuple[Group, Group],
    found: Comparison,
    threshold: float,
    reason: str | None = None,
) -> ComparedFigure:
    """Judge step times over processes, with regard to the noise.

    A step is slower where the report's verdict says so, the bootstrap interval of the ratio lies
    above 1, and the ratio is beyond the threshold.

    Args:
        key: The run.
        groups: Its processes, the baseline's first.
        found: How they compare.
        threshold: A share of the baseline's time.
        reason: Why there is no verdict, whatever the times are.
    """
    baseline, candidate = groups
    counts = len(baseline.step_s), len(candidate.step_s)
    if reason is None and not can_differ(*counts):
        told = f"{counts[0]} and {counts[1]}, and 4 on each side are enough"
        reason = f"not enough replicates: {told}"
    judgement: Judgement = "undecided" if reason else _judge_ratio(found, threshold)
    interval = found.interval
    return ComparedFigure(
        experiment_id=key[0],
        instrument=key[1],
        metric="time",
        figure="step time",
        unit="seconds",
        baseline=float(median(baseline.step_s)),
        candidate=float(median(candidate.step_s)),
        ratio=found.ratio,
        threshold=threshold,
        judgement=judgement,
        reason=reason,
        statistics=TimeStatistics(
            baseline_processes=counts[0],
            candidate_processes=counts[1],
            ratio_low=interval and interval.low,
            ratio_high=interval and interval.high,
            p_value=found.p_value,
            noise_floor=found.floor,
        ),
    )


def _judge_ratio(found: Comparison, threshold: float) -> Judgement:
    if found.verdict in (None, NO_DIFFERENCE) or found.interval is None:
        return "same"
    if found.interval.low <= 1 <= found.interval.high:
        return "same"
    if max(found.ratio, 1 / found.ratio) <= 1 + threshold:
        return "within threshold"
    return "worse" if found.ratio > 1 else "better"
