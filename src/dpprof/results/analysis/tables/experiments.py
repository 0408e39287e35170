"""Tables over processes: ``experiments``, ``settings``, ``methods``, ``instrument_overhead``.

A setting is everything in an experiment except the method and its privacy parameters: the model,
the batch size, the sequence length, and so on.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from dpprof.experiments.records.result import Observed
from dpprof.experiments.records.terms import OUTCOMES
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.groups import ExperimentRuns, Noise
from dpprof.results.analysis.standings import UNKNOWN
from dpprof.results.analysis.statistics import NO_DIFFERENCE, Comparison, median_interval
from dpprof.results.analysis.tables.axes import BASELINE, SETTING, axes_of


class Standard(NamedTuple):
    """What experiments are compared with: the non-private step with all else equal."""

    bases: Mapping[str, ExperimentRuns]  # baselines by setting. Several equal ones count as one.
    compared: Mapping[str, Comparison]  # step times of private methods beside it, by experiment


def compare_with_standard(groups: Sequence[ExperimentRuns], noise: Noise) -> Standard:
    """Find the baseline of each setting, and compare the step times of private methods with it."""
    baselines: dict[str, list[ExperimentRuns]] = defaultdict(list)
    for group in groups:
        if group.experiment.method == BASELINE:
            baselines[group.setting].append(group)
    bases = {}
    for setting, alike in baselines.items():
        results = [result for group in alike for result in group.results]
        bases[setting] = dataclasses.replace(alike[0], planned=len(results), results=results)
    compared = {
        group.experiment.id: noise.compare(group, base)
        for group in _list_private(groups)
        if (base := bases.get(group.setting)) and group.step_s and base.step_s
    }
    return Standard(bases, compared)


def _list_private(groups: Iterable[ExperimentRuns]) -> list[ExperimentRuns]:
    return [group for group in groups if group.experiment.method != BASELINE]


_OF_STANDING = ("mechanism", "verified", "max_relative_error")


def list_experiments(
    groups: Sequence[ExperimentRuns], standard: Standard, standings: Mapping[str, Standing]
) -> list[dict[str, Any]]:
    """Return one row per experiment, with medians over its processes, never over steps.

    Ratios are to ``standard`` with all else equal.
    """
    rows = []
    for group in groups:
        standing = standings.get(group.experiment.id, UNKNOWN)
        row = _experiment_row(group)
        row |= {name: getattr(standing, name) for name in _OF_STANDING}
        if base := standard.bases.get(group.setting):
            if comparison := standard.compared.get(group.experiment.id):
                row |= _tell("step", comparison)
                row |= {"step_p_value": comparison.p_value, "step_floor": comparison.floor}
            elif group.step_s and base.step_s:  # a baseline
                row["step_ratio"] = median(group.step_s) / median(base.step_s)
            # Peaks of two kinds are not compared; allocator's peaks repeat exactly.
            if group.peaks.kind is not None and group.peaks.kind == base.peaks.kind:
                row["peak_ratio"] = median(group.peaks.sizes) / median(base.peaks.sizes)
            if group.sent_bytes is not None and base.sent_bytes is not None:
                row["sent_beyond_bytes"] = group.sent_bytes - base.sent_bytes
        rows.append(row)
    return rows


def _experiment_row(group: ExperimentRuns) -> dict[str, Any]:
    interval = median_interval(group.step_s)
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


def _tell(name: str, comparison: Comparison) -> dict[str, Any]:
    interval = comparison.interval
    return {
        f"{name}_ratio": comparison.ratio,
        f"{name}_ratio_low": interval and interval.low,
        f"{name}_ratio_high": interval and interval.high,
        f"{name}_verdict": comparison.verdict,
    }


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None


def list_settings(
    groups: Sequence[ExperimentRuns], standard: Standard, noise: Noise
) -> list[dict[str, Any]]:
    """Return one row per setting in which a private method succeeded.

    ``smallest`` and ``fastest`` compare medians over processes. ``not_slower`` names the methods
    whose step time does not detectably differ from the fastest one's. ``noise_known`` is false
    where nothing was replicated. Ratios are to ``standard``.
    """
    settings: dict[str, list[ExperimentRuns]] = defaultdict(list)
    for group in groups:
        settings[group.setting].append(group)
    timed = [group for group in _list_private(groups) if group.step_s]
    by_speed = sorted(timed, key=lambda group: median(group.step_s))
    fastest = {group.setting: group for group in reversed(by_speed)}
    verdicts: dict[str, dict[str, str | None]] = defaultdict(dict)
    for group in timed:
        if group is not (first := fastest[group.setting]):
            verdict = noise.compare(group, first).verdict
            verdicts[group.setting][group.experiment.method] = verdict
    rows = []
    for setting, alike in settings.items():
        private = _list_private(alike)
        methods = sum(bool(group.step_s or group.peaks.sizes) for group in private)
        if not methods:
            continue
        models = [r.model for group in alike for r in group.results if r.model]
        axes = axes_of(alike[0].experiment)
        rows.append(
            {name: axes[name] for name in SETTING}
            | {"parameters_total": models[0].parameters_total if models else None}
            | {"methods": methods}
            | _smallest(private, standard.bases.get(setting))
            | _fastest(fastest.get(setting), verdicts[setting], standard)
        )
    return rows


def _smallest(private: Sequence[ExperimentRuns], base: ExperimentRuns | None) -> dict[str, Any]:
    kinds = {group.peaks.kind for group in private} - {None}
    if len(kinds) != 1:  # peaks of two kinds cannot be compared
        return {}
    sized = [group for group in private if group.peaks.sizes]
    smallest = min(sized, key=lambda group: median(group.peaks.sizes))
    peak = median(smallest.peaks.sizes)
    comparable = base is not None and base.peaks.kind == smallest.peaks.kind
    return {
        "smallest": smallest.experiment.method,
        "peak_kind": smallest.peaks.kind,
        "smallest_peak_bytes": peak,
        "smallest_ratio": peak / median(base.peaks.sizes) if base and comparable else None,
    }


def _fastest(
    fastest: ExperimentRuns | None, others: Mapping[str, str | None], standard: Standard
) -> dict[str, Any]:
    if fastest is None:
        return {}
    alike = sorted(name for name, verdict in others.items() if verdict == NO_DIFFERENCE)
    comparison = standard.compared.get(fastest.experiment.id)
    verdicts = [*others.values(), *([] if comparison is None else [comparison.verdict])]
    row = {
        "fastest": fastest.experiment.method,
        "fastest_step_s": median(fastest.step_s),
        "not_slower": " ".join(alike) or None,
        "noise_known": None not in verdicts,
    }
    return row if comparison is None else row | _tell("fastest", comparison)


_RATIOS = ("step_ratio", "peak_ratio")


def tabulate_methods(experiments: pd.DataFrame) -> pd.DataFrame:
    """Return one row per method: how many ratios are known, their median, smallest and largest.

    Ratios of resident memory count only if no experiment has an allocator's peak. A method counts
    as verified if it is in every experiment, and as failed if it failed in one.
    """
    allocated = experiments["peak_kind"] == "allocated"
    if allocated.any():
        peaks = experiments["peak_ratio"].where(allocated)
        experiments = experiments.assign(peak_ratio=peaks)
    figures = experiments.astype(dict.fromkeys([*_RATIOS, "max_relative_error"], float))
    ends = ("count", "median", "min", "max")
    rows = figures.groupby("method").agg(
        experiments=("experiment_id", "size"),
        **{f"{ratio}_{end}": (ratio, end) for ratio in _RATIOS for end in ends},
        mechanism=("mechanism", "first"),
        verified=("verified", _all_verified),
        max_relative_error=("max_relative_error", "max"),
    )
    return rows.reset_index()


def _all_verified(verified: "pd.Series[bool]") -> bool | None:
    if verified.eq(False).any():
        return False
    return True if verified.eq(True).all() else None


_RATIO_OF = {
    "step_s": "step_ratio",
    "peak_rss_bytes": "rss_ratio",
    "peak_allocated_bytes": "allocated_ratio",
}


def list_instrument_overhead(groups: Sequence[ExperimentRuns]) -> Iterator[dict[str, Any]]:
    """Return one row per experiment and instrument: medians over processes, and ratios to clean.

    Experiments without a clean run, and instruments that run nothing, have no row.
    """
    for group in groups:
        observed: dict[str, list[Observed]] = defaultdict(list)
        for result in group.results:
            if result.observed is not None:
                observed[result.instrument].append(result.observed)
        if not (clean := observed.pop("clean", [])):
            continue
        base = {figure: _median_of(clean, figure) for figure in _RATIO_OF}
        for instrument, watched in observed.items():
            own = {figure: _median_of(watched, figure) for figure in _RATIO_OF}
            both = [name for name in _RATIO_OF if own[name] is not None and base[name]]
            yield (
                {"experiment_id": group.experiment.id, "instrument": instrument}
                | axes_of(group.experiment)
                | {"processes": len(watched), "clean_processes": len(clean)}
                | own
                | {f"clean_{figure}": value for figure, value in base.items()}
                | {_RATIO_OF[name]: own[name] / base[name] for name in both}
            )


def _median_of(observed: Sequence[Observed], figure: str) -> Any:
    values = [getattr(part, figure) for part in observed]
    return None if None in values else median(values)
