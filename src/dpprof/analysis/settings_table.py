"""The table ``settings``: which private method needs least memory and which is fastest, by setting.

A setting is everything in an experiment except the method and its privacy parameters: the model,
the batch size, the sequence length, and so on.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpprof.analysis.axes import BASELINE, SETTING, axes_of
from dpprof.analysis.frames import make_frame
from dpprof.analysis.groups import Group, Noise, merge, setting_key
from dpprof.analysis.statistics import NO_DIFFERENCE


def tabulate_settings(groups: Sequence[Group], noise: Noise) -> pd.DataFrame:
    """Return one row per setting in which a private method succeeded.

    ``smallest`` and ``fastest`` compare medians over processes. ``not_slower`` names the methods
    whose step time does not detectably differ from the fastest one's. ``noise_known`` is false
    where nothing was replicated. Ratios are to ``standard``.
    """
    settings: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        settings[setting_key(group.experiment)].append(group)
    rows = (_describe(competing, noise) for competing in settings.values())
    return make_frame("settings", (row for row in rows if row["methods"]))


def _describe(groups: Sequence[Group], noise: Noise) -> dict[str, Any]:
    private = [group for group in groups if group.experiment.method != BASELINE]
    baselines = [group for group in groups if group.experiment.method == BASELINE]
    base = merge(baselines) if baselines else None
    models = [r.model for group in groups for r in group.results if r.model]
    axes = axes_of(groups[0].experiment)
    return (
        {name: axes[name] for name in SETTING}
        | {"parameters_total": models[0].parameters_total if models else None}
        | {"methods": sum(bool(group.step_s or group.peaks.sizes) for group in private)}
        | _smallest(private, base)
        | _fastest(private, base, noise)
    )


def _smallest(private: Sequence[Group], base: Group | None) -> dict[str, Any]:
    kinds = {group.peaks.kind for group in private} - {None}
    if len(kinds) != 1:  # peaks of two kinds cannot be compared
        return {}
    known = [group for group in private if group.peaks.sizes]
    smallest = min(known, key=lambda group: median(group.peaks.sizes))
    peak = median(smallest.peaks.sizes)
    comparable = base is not None and base.peaks.kind == smallest.peaks.kind
    return {
        "smallest": smallest.experiment.method,
        "peak_kind": smallest.peaks.kind,
        "smallest_peak_bytes": peak,
        "smallest_ratio": peak / median(base.peaks.sizes) if base and comparable else None,
    }


def _fastest(private: Sequence[Group], base: Group | None, noise: Noise) -> dict[str, Any]:
    timed = [group for group in private if group.step_s]
    if not timed:
        return {}
    fastest = min(timed, key=lambda group: median(group.step_s))
    others = {
        group.experiment.method: noise.compare(group, fastest).verdict
        for group in timed
        if group is not fastest
    }
    alike = sorted(name for name, verdict in others.items() if verdict == NO_DIFFERENCE)
    row = {
        "fastest": fastest.experiment.method,
        "fastest_step_s": median(fastest.step_s),
        "not_slower": " ".join(alike) or None,
        "noise_known": None not in others.values(),
    }
    if base is None or not base.step_s:
        return row
    found = noise.compare(fastest, base)
    return row | {
        "fastest_ratio": found.ratio,
        "fastest_ratio_low": found.interval and found.interval.low,
        "fastest_ratio_high": found.interval and found.interval.high,
        "fastest_verdict": found.verdict,
        "noise_known": row["noise_known"] and found.verdict is not None,
    }
