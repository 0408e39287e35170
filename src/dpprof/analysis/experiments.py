"""The table ``experiments``: each experiment over its processes, and against its baseline."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from dpprof.analysis.collection import Collected
from dpprof.analysis.frames import AXES, axes_of, make_frame
from dpprof.analysis.statistics import compare, median_interval, noise_floor
from dpprof.experiment import Experiment
from dpprof.result import OUTCOMES, Result
from dpprof.storage import canonical_json

BASELINE = "standard"
_NOT_IN_BASELINE = {"method", "max_grad_norm", "noise_multiplier"}
"""What the non-private step does not depend on."""

_COLUMNS = [
    "experiment_id",
    *AXES,
    "parameters_total",
    "runs",
    "runs_ok",
    "outcome",
    "processes",
    "median_step_s",
    "step_low_s",
    "step_high_s",
    "tokens_per_s",
    "peak_kind",
    "peak_processes",
    "peak_bytes",
    "peak_min_bytes",
    "peak_max_bytes",
    "reserved_min_bytes",
    "reserved_max_bytes",
    "rss_min_bytes",
    "rss_max_bytes",
    "step_ratio",
    "step_ratio_low",
    "step_ratio_high",
    "step_p_value",
    "step_floor",
    "step_verdict",
    "peak_ratio",
]


class _Peaks(NamedTuple):
    """What is known of a peak, one value a process."""

    kind: str | None
    values: Sequence[int]


class _Group(NamedTuple):
    """An experiment and what its processes measured."""

    experiment: Experiment
    planned: int
    results: Sequence[Result]

    @property
    def step_s(self) -> list[float]:
        """Medians of the clean processes: the only source of step times."""
        return [r.time.median_s for r in self._ok("clean") if r.time]

    @property
    def peaks(self) -> _Peaks:
        """The allocator's peaks, from clean processes or else ``phases``; else resident memory."""
        sources = (
            ("allocated", "clean", "peak_allocated_bytes"),
            ("allocated", "phases", "peak_allocated_bytes"),
            ("rss", "clean", "peak_rss_bytes"),
        )
        for kind, instrument, figure in sources:
            values = self.peaks_of(instrument, figure)
            if values:
                return _Peaks(kind, values)
        return _Peaks(None, [])

    def peaks_of(self, instrument: str, figure: str) -> list[int]:
        """One figure of ``memory``, where it is known, of the processes of an instrument."""
        found = (getattr(r.memory, figure) for r in self._ok(instrument) if r.memory)
        return [value for value in found if value is not None]

    def _ok(self, instrument: str) -> list[Result]:
        return [r for r in self.results if r.instrument == instrument and r.outcome == "ok"]


class _Noise:
    """How much processes of the same experiment differ, by what makes experiments alike."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._step_s: dict[str, list[Sequence[float]]] = defaultdict(list)
        self._floors: dict[tuple[str, tuple[int, int]], float | None] = {}
        for group in groups:
            for key in self._keys(group.experiment):
                self._step_s[key].append(group.step_s)

    def floor(self, experiment: Experiment, counts: tuple[int, int]) -> float | None:
        """Take the noise floor from the most alike experiments that were replicated."""
        found = (self._floor(key, counts) for key in self._keys(experiment))
        return next((floor for floor in found if floor is not None), None)

    def _floor(self, key: str, counts: tuple[int, int]) -> float | None:
        if (key, counts) not in self._floors:
            self._floors[key, counts] = noise_floor(self._step_s[key], counts)
        return self._floors[key, counts]

    @staticmethod
    def _keys(experiment: Experiment) -> tuple[str, str]:
        """Name those with the same baseline, then those of the same model on the same device."""
        model = axes_of(experiment)["model"]
        return _baseline_key(experiment), f"{model} on {experiment.device}"


def tabulate_experiments(collected: Collected) -> pd.DataFrame:
    """Reduce runs over their processes: medians over processes, never over steps.

    Ratios are to ``standard`` with all else equal; several such baselines count as one.
    """
    groups = _group(collected)
    noise = _Noise(groups)
    baselines: dict[str, list[_Group]] = defaultdict(list)
    for group in groups:
        if group.experiment.method == BASELINE:
            baselines[_baseline_key(group.experiment)].append(group)
    rows = []
    for group in groups:
        row = _describe(group)
        if alike := baselines[_baseline_key(group.experiment)]:
            base = _merge(alike)
            row |= _compare_steps(group, base, noise) | _compare_peaks(group, base)
        rows.append(row)
    return make_frame(rows, _COLUMNS)


def _group(collected: Collected) -> list[_Group]:
    planned: dict[str, int] = defaultdict(int)
    results: dict[str, list[Result]] = defaultdict(list)
    for run in [*(run for run, _ in collected.found), *collected.missing]:
        planned[run.id] += 1
    for run, result in collected.found:
        results[run.id].append(result)
    return [_Group(found[0].experiment, planned[name], found) for name, found in results.items()]


def _merge(groups: Sequence[_Group]) -> _Group:
    results = [result for group in groups for result in group.results]
    return _Group(groups[0].experiment, len(results), results)


def _baseline_key(experiment: Experiment) -> str:
    """Spell what an experiment must share with its non-private baseline."""
    return canonical_json(experiment.model_dump(mode="json", exclude=_NOT_IN_BASELINE))


def _describe(group: _Group) -> dict[str, Any]:
    experiment, results = group.experiment, group.results
    ok = [result for result in results if result.outcome == "ok"]
    steps = pd.Series(group.step_s, dtype=float)
    step_s = _or_none(steps.median())
    interval = median_interval(group.step_s)
    peaks = pd.Series(group.peaks.values, dtype=float)
    return (
        {"experiment_id": experiment.id}
        | axes_of(experiment)
        | {
            "parameters_total": next((r.model.parameters_total for r in ok if r.model), None),
            "runs": group.planned,
            "runs_ok": len(ok),
            "outcome": " ".join(name for name in OUTCOMES if name in {r.outcome for r in results}),
            "processes": len(steps),
            "median_step_s": step_s,
            "step_low_s": interval and interval.low,
            "step_high_s": interval and interval.high,
            "tokens_per_s": step_s and experiment.batch_size * experiment.seq_len / step_s,
            "peak_kind": group.peaks.kind,
            "peak_processes": len(peaks),
            "peak_bytes": _or_none(peaks.median()),
            "peak_min_bytes": _or_none(peaks.min()),
            "peak_max_bytes": _or_none(peaks.max()),
        }
        | _spread("reserved", group.peaks_of("clean", "peak_reserved_bytes"))
        | _spread("rss", group.peaks_of("clean", "peak_rss_bytes"))
    )


def _spread(name: str, values: Sequence[int]) -> dict[str, Any]:
    if not values:
        return {}
    return {f"{name}_min_bytes": min(values), f"{name}_max_bytes": max(values)}


def _compare_steps(group: _Group, base: _Group, noise: _Noise) -> dict[str, Any]:
    if not group.step_s or not base.step_s:
        return {}
    if group.experiment.method == BASELINE:
        return {"step_ratio": median(group.step_s) / median(base.step_s)}
    floor = noise.floor(group.experiment, (len(group.step_s), len(base.step_s)))
    found = compare(group.step_s, base.step_s, floor)
    return {
        "step_ratio": found.ratio,
        "step_ratio_low": found.interval and found.interval.low,
        "step_ratio_high": found.interval and found.interval.high,
        "step_p_value": found.p_value,
        "step_floor": floor,
        "step_verdict": found.verdict,
    }


def _compare_peaks(group: _Group, base: _Group) -> dict[str, Any]:
    """Compare peaks of the same kind; the allocator's have no noise, so a ratio is enough."""
    peaks, base_peaks = group.peaks, base.peaks
    if peaks.kind is None or peaks.kind != base_peaks.kind:
        return {}
    return {"peak_ratio": median(peaks.values) / median(base_peaks.values)}


def _or_none(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
