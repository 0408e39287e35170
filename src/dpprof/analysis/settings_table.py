"""The table ``settings``: which private method needs least memory and which is fastest, by setting.

A setting is everything in an experiment except the method and its privacy parameters: the model,
the batch size, the sequence length, and so on.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any, NamedTuple, Self

import pandas as pd

from dpprof.analysis.axes import BASELINE, SETTING, axes_of
from dpprof.analysis.frames import make_frame
from dpprof.analysis.groups import Group, Noise, merge
from dpprof.analysis.statistics import NO_DIFFERENCE, Comparison


def tabulate_settings(groups: Sequence[Group], noise: Noise) -> pd.DataFrame:
    """Return one row per setting in which a private method succeeded.

    ``smallest`` and ``fastest`` compare medians over processes. ``not_slower`` names the methods
    whose step time does not detectably differ from the fastest one's. ``noise_known`` is false
    where nothing was replicated. Ratios are to ``standard``.
    """
    settings: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        settings[group.setting].append(group)
    competing = [_Setting.of(alike) for alike in settings.values()]
    compared = iter(noise.compare_all([pair for one in competing for pair in one.pairs]))
    rows = (_describe(one, list(islice(compared, len(one.pairs)))) for one in competing)
    return make_frame("settings", (row for row in rows if row["methods"]))


class _Setting(NamedTuple):
    """The experiments of a setting, and what is to be compared in it."""

    groups: Sequence[Group]
    private: Sequence[Group]
    base: Group | None
    fastest: Group | None
    """The fastest private method; None where none was timed."""

    pairs: Sequence[tuple[Group, Group]]
    """Each other timed method beside the fastest; last the fastest beside a timed baseline."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Self:
        private = [group for group in groups if group.experiment.method != BASELINE]
        baselines = [group for group in groups if group.experiment.method == BASELINE]
        base = merge(baselines) if baselines else None
        timed = [group for group in private if group.step_s]
        if not timed:
            return cls(groups, private, base, None, ())
        fastest = min(timed, key=lambda group: median(group.step_s))
        pairs = [(group, fastest) for group in timed if group is not fastest]
        if base is not None and base.step_s:
            pairs.append((fastest, base))
        return cls(groups, private, base, fastest, pairs)


def _describe(setting: _Setting, compared: Sequence[Comparison]) -> dict[str, Any]:
    groups, private, base, _, _ = setting
    models = [r.model for group in groups for r in group.results if r.model]
    axes = axes_of(groups[0].experiment)
    return (
        {name: axes[name] for name in SETTING}
        | {"parameters_total": models[0].parameters_total if models else None}
        | {"methods": sum(bool(group.step_s or group.peaks.sizes) for group in private)}
        | _smallest(private, base)
        | _fastest(setting, compared)
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


def _fastest(setting: _Setting, compared: Sequence[Comparison]) -> dict[str, Any]:
    fastest, base = setting.fastest, setting.base
    if fastest is None:
        return {}
    found = compared[-1] if base is not None and base.step_s else None
    others = {
        group.experiment.method: comparison.verdict
        for (group, against), comparison in zip(setting.pairs, compared, strict=True)
        if against is fastest
    }
    alike = sorted(name for name, verdict in others.items() if verdict == NO_DIFFERENCE)
    row = {
        "fastest": fastest.experiment.method,
        "fastest_step_s": median(fastest.step_s),
        "not_slower": " ".join(alike) or None,
        "noise_known": None not in others.values(),
    }
    if found is None:
        return row
    return row | {
        "fastest_ratio": found.ratio,
        "fastest_ratio_low": found.interval and found.interval.low,
        "fastest_ratio_high": found.interval and found.interval.high,
        "fastest_verdict": found.verdict,
        "noise_known": row["noise_known"] and found.verdict is not None,
    }
