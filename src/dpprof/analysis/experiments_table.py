"""The table ``experiments``: each experiment over its processes, with ratios to its baseline."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpprof.analysis.axes import BASELINE, axes_of
from dpprof.analysis.frames import make_frame
from dpprof.analysis.groups import Group, Noise, merge
from dpprof.analysis.standings import UNKNOWN
from dpprof.analysis.statistics import Comparison, Interval, median_intervals
from dpprof.records.terms import OUTCOMES
from dpprof.records.verdict import Standing


def tabulate_experiments(
    groups: Sequence[Group], noise: Noise, standings: Mapping[str, Standing]
) -> pd.DataFrame:
    """Return one row per experiment, with medians over its processes, never over steps.

    Ratios are to ``standard`` with all else equal. Several equal baselines count as one.
    """
    baselines: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.experiment.method == BASELINE:
            baselines[group.setting].append(group)
    bases = {setting: merge(alike) for setting, alike in baselines.items()}
    intervals = median_intervals([group.step_s for group in groups])
    timed = [
        (group, base)
        for group in groups
        if (base := bases.get(group.setting)) and group.step_s and base.step_s
    ]
    private = [pair for pair in timed if pair[0].experiment.method != BASELINE]
    compared = zip(private, noise.compare_all(private), strict=True)
    found = {group.experiment.id: comparison for (group, _), comparison in compared}
    rows = []
    for group, interval in zip(groups, intervals, strict=True):
        standing = standings.get(group.experiment.id, UNKNOWN)
        row = _describe(group, interval) | {
            "mechanism": standing.mechanism,
            "verified": standing.verified,
            "max_relative_error": standing.max_relative_error,
        }
        if base := bases.get(group.setting):
            row |= _compare_steps(group, base, found.get(group.experiment.id))
            row |= _compare_peaks(group, base)
            if group.sent_bytes is not None and base.sent_bytes is not None:
                row["sent_beyond_bytes"] = group.sent_bytes - base.sent_bytes
        rows.append(row)
    return make_frame("experiments", rows)


def _describe(group: Group, interval: Interval | None) -> dict[str, Any]:
    experiment, results = group.experiment, group.results
    ok = [result for result in results if result.outcome == "ok"]
    step_s = _median(group.step_s)
    peaks = group.peaks.sizes
    return (
        {"experiment_id": experiment.id}
        | axes_of(experiment)
        | {
            "parameters_total": next((r.model.parameters_total for r in ok if r.model), None),
            "runs": group.planned,
            "runs_ok": len(ok),
            "outcome": " ".join(name for name in OUTCOMES if name in {r.outcome for r in results}),
            "processes": len(group.step_s),
            "median_step_s": step_s,
            "step_low_s": interval and interval.low,
            "step_high_s": interval and interval.high,
            "tokens_per_s": step_s and experiment.tokens_in_step / step_s,
            "peak_kind": group.peaks.kind,
            "peak_processes": len(peaks),
            "peak_bytes": _median(peaks),
            "peak_min_bytes": float(min(peaks)) if peaks else None,
            "peak_max_bytes": float(max(peaks)) if peaks else None,
            "sent_bytes": group.sent_bytes,
        }
        | _spread("reserved", group.peaks_of("clean", "peak_reserved_bytes"))
        | _spread("rss", group.peaks_of("clean", "peak_rss_bytes"))
    )


def _spread(name: str, values: Sequence[int]) -> dict[str, Any]:
    if not values:
        return {}
    return {f"{name}_min_bytes": min(values), f"{name}_max_bytes": max(values)}


def _compare_steps(group: Group, base: Group, found: Comparison | None) -> dict[str, Any]:
    if not group.step_s or not base.step_s:
        return {}
    if found is None:  # a baseline
        return {"step_ratio": median(group.step_s) / median(base.step_s)}
    return {
        "step_ratio": found.ratio,
        "step_ratio_low": found.interval and found.interval.low,
        "step_ratio_high": found.interval and found.interval.high,
        "step_p_value": found.p_value,
        "step_floor": found.floor,
        "step_verdict": found.verdict,
    }


def _compare_peaks(group: Group, base: Group) -> dict[str, Any]:
    """Return the ratio of two peaks of the same kind; allocator peaks repeat exactly."""
    peaks, base_peaks = group.peaks, base.peaks
    if peaks.kind is None or peaks.kind != base_peaks.kind:
        return {}
    return {"peak_ratio": median(peaks.sizes) / median(base_peaks.sizes)}


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None
