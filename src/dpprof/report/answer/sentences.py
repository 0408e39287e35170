"""The answer of a report, in two or three sentences: targets first, then this machine."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from dpprof.analysis.selection import (
    Tables,
    find_fitting,
    find_here,
    find_on_targets,
    find_predicted,
    measured,
)
from dpprof.analysis.statistics import NO_DIFFERENCE
from dpprof.analysis.tables.axes import BASELINE, name_size, name_speed
from dpprof.analysis.tables.frames import least_of
from dpprof.report.wording import (
    ALIKE,
    ENDS,
    THIS_MACHINE,
    count_failures,
    is_alike,
    listed,
    name_setting,
    name_training,
    number,
    plural,
    reach,
    rounded,
    rows_in,
    significant,
    span,
    times,
)

_GIB, _MIB, _MS = 2**30, 2**20, 1e-3


def tell_answer(tables: Tables) -> list[str]:
    """Return the answer: capacities on targets, times here, and predicted peaks; at most three.

    Each sentence is about the setting that ``analysis.focus`` chooses, and says where others
    differ. Where nothing succeeded, the answer says so, with one of the reasons.
    """
    targets, predicted = find_on_targets(tables), find_predicted(tables)
    said = [_tell_capacity(targets)] if targets else []
    here = find_here(tables["experiments"])
    if len(here):
        said.append(_tell_here(here, tables))
    alone = {target: rows for target, rows in predicted.items() if target not in targets}
    if alone:
        said.append(_tell_predicted(*next(iter(alone.items()))))
    return said or [_tell_nothing(tables["runs"])]


def _tell_capacity(targets: Mapping[str, pd.DataFrame]) -> str:
    target, options = next(iter(targets.items()))
    said = " ".join(_tell_options(target, options))
    others = {
        name: _find_first(rows) for name, rows in list(targets.items())[1:] if name != THIS_MACHINE
    }
    first = _find_first(options)
    alike = [name for name, other in others.items() if first and other == first]
    told = [f"it is first on {listed(alike)} too"] if alike else []
    told += [
        f"on {name}, {one} is first" for name, one in others.items() if one not in (None, first)
    ]
    return "; ".join([said, *told]) + "."


def _find_first(options: pd.DataFrame) -> str | None:
    first = options.loc[options["verdict"] == "first", "method"]
    return str(first.iloc[0]) if len(first) else None


def _tell_options(target: str, options: pd.DataFrame) -> Iterator[str]:
    row = options.iloc[0]
    what = f"{name_training(row)} at {name_size(row)}"
    wrong = options.loc[options["verdict"] == "wrong", "method"]
    failed = f"; {listed(wrong)} failed verification" if len(wrong) else ""
    ranked = options[options["verdict"].isin(["first", "close", "slower"])]
    unranked = options[(options["verdict"] == "unranked") & options["safe_batch_size"].notna()]
    plain = options[options["method"] == BASELINE]
    base = plain.iloc[0] if len(plain) else None
    if len(ranked):
        yield _tell_ranked(target, what, ranked, base) + _tell_unfit(options) + failed
    elif len(unranked):
        best = least_of(unranked, "safe_batch_size", -1)
        yield (
            f"On {target}, {best['method']} trains {what} with {_batches(best, base)}, but no time "
            f"is predicted there{failed}"
        )
    else:
        yield f"On {target}, no private method of the sweep safely fits {what}{failed}"


def _tell_ranked(target: str, what: str, ranked: pd.DataFrame, base: Any) -> str:
    best = ranked[ranked["verdict"] == "first"].iloc[0]
    said = (
        f"On {target}, {best['method']} trains {what} with {_batches(best, base)} at a predicted "
        f"{rounded(best['tokens_per_s'])} {name_speed([best])}"
    )
    known = base is not None and pd.notna(base["tokens_per_s"])
    if known:
        speed = best["tokens_per_s"] / base["tokens_per_s"]
        flops = best["dp_flop_multiplier"] / base["dp_flop_multiplier"]
        said += f", {times(speed)} the speed of plain training"
        said += f" and {times(flops)} its FLOPs" if pd.notna(flops) else ""
    others = ranked[ranked["method"] != best["method"]]
    if others.empty:
        return said
    close = others.loc[others["verdict"] == "close", "method"]
    if len(close):
        return f"{said}; no difference is predicted between it and {listed(close)}"
    rival = least_of(others, "tokens_per_s", -1)
    reaches = f"reaches {rounded(rival['tokens_per_s'])}"
    if known:
        reaches = f"reaches {times(rival['tokens_per_s'] / base['tokens_per_s'])} that speed"
    return f"{said}; {rival['method']}, the next, fits {_batch(rival)} and {reaches}"


def _batch(row: Any) -> str:
    least = "at least " if row["limited_by"] == "search" else ""
    return f"{least}{number(row['safe_batch_size'], digits=0)}"


def _batches(row: Any, base: Any) -> str:
    """Return a method's largest safe batch, beside that of plain training."""
    said = f"batches of {_batch(row)}"
    if base is None or pd.isna(base["safe_batch_size"]):
        return said
    same = base["safe_batch_size"] == row["safe_batch_size"]
    return f"{said} ({'as' if same else _batch(base)} in plain training)"


def _tell_unfit(options: pd.DataFrame) -> str:
    beyond = options.loc[options["verdict"] == "does not fit", "method"]
    return f"; {listed(beyond)} {plural(len(beyond), 'does', 'do')} not fit" if len(beyond) else ""


def _tell_here(rows: pd.DataFrame, tables: Tables) -> str:
    private = rows[rows["method"] != BASELINE]
    where = f"On {THIS_MACHINE}, a step of {name_setting(rows.iloc[0])}"
    timed = private.dropna(subset=["median_step_s"])
    if private.empty:
        return f"{where} {_absolute(rows.iloc[0])} without privacy; no private method succeeded."
    if timed.empty:
        return f"{where} {_tell_peaks(private)}."
    fastest = least_of(timed, "median_step_s")
    said = f"{where} {_tell_fastest(fastest)}"
    if len(timed) > 1:
        said += f"; {_tell_rest(timed, fastest, tables)}"
    return f"{said}.{_tell_elsewhere(fastest, tables)}"


def _absolute(row: Any) -> str:
    facts = []
    if pd.notna(row["median_step_s"]):
        facts.append(f"takes {number(row['median_step_s'], _MS)} ms")
    if pd.notna(row["peak_bytes"]):
        kind = "allocated" if row["peak_kind"] == "allocated" else "resident, libraries included"
        facts.append(f"peaks at {number(row['peak_bytes'], _MIB)} MiB {kind}")
    return " and ".join(facts)


def _tell_peaks(private: pd.DataFrame) -> str:
    least = least_of(private, "peak_bytes")
    ratio = (
        f", {times(least['peak_ratio'])} plain training" if pd.notna(least["peak_ratio"]) else ""
    )
    return f"{_absolute(least)} with {least['method']}{ratio}; no time was measured"


def _tell_fastest(row: Any) -> str:
    ratio, method = row["step_ratio"], row["method"]
    if pd.isna(ratio):
        return f"{_absolute(row)} with {method}"
    if row["step_verdict"] == NO_DIFFERENCE:
        said = f"takes no detectably different time with {method} from plain training"
    else:
        interval = span(row["step_ratio_low"], row["step_ratio_high"], digits=2)
        sure = "not replicated" if interval == "-" else f"95 % interval {interval}"
        said = f"takes {times(ratio)} as long with {method} as without privacy ({sure})"
    peak = row["peak_ratio"]
    if pd.isna(peak):
        return said
    memory = "the same peak memory" if is_alike(peak) else f"{times(peak)} the peak memory"
    return f"{said}, at {memory}"


def _tell_rest(timed: pd.DataFrame, fastest: Any, tables: Tables) -> str:
    """Return what the other private methods take, and which has the lowest peak."""
    others = timed[timed["method"] != fastest["method"]]
    count = f"the other {len(others)}" if len(others) > 1 else str(others["method"].iloc[0])
    takes = plural(len(others), "takes", "take")
    ratios = others["step_ratio"].dropna().astype(float)
    steps = others["median_step_s"].astype(float) / _MS
    known, unit, digits = (ratios, "times", 2) if len(ratios) else (steps, "ms", 1)
    ends = (number(known.agg(end), digits=digits) for end in ENDS)
    said = f"{count} {takes} {reach(*ends)} {unit}"
    if alike := _not_slower(fastest, tables):
        said += (
            f", of which {listed(alike)} not detectably more" if len(others) > len(alike) else ""
        )
    peaks = timed["peak_bytes"].dropna().astype(float)
    if peaks.empty or len(set(timed["peak_kind"])) > 1:
        return said
    lowest = timed.loc[peaks.index[peaks / peaks.min() < 1 + ALIKE]]
    if fastest["method"] in set(lowest["method"]):
        return said
    least = least_of(lowest, "median_step_s")
    ratio, step = least["peak_ratio"], least["step_ratio"]
    if pd.notna(ratio) and pd.notna(step):
        return (
            f"{said}, and {least['method']} has the lowest peak, {times(ratio)} plain training's, "
            f"at {times(step)} the time"
        )
    peak = number(least["peak_bytes"], _MIB)
    return f"{said}, and {least['method']} has the lowest peak, {peak} MiB"


def _not_slower(fastest: Any, tables: Tables) -> list[str]:
    names = rows_in(fastest, tables["settings"])["not_slower"].dropna()
    return str(names.iloc[0]).split() if len(names) else []


def _tell_elsewhere(fastest: Any, tables: Tables) -> str:
    """Return whether the same private method is fastest in the other settings, or which is."""
    known = tables["settings"].dropna(subset=["fastest"])
    if len(known) < 2 or measured(tables["experiments"]).empty:  # noqa: PLR2004 (one says nothing)
        return ""
    others = known.loc[known["fastest"] != fastest["method"], "fastest"]
    if others.empty:
        return f" It is the fastest private method in all {len(known):,} settings measured."
    where = f"the other {len(others):,} settings" if len(others) > 1 else "the other setting"
    if len(others) + 1 < len(known):
        where = f"{len(others):,} of the {len(known):,} settings"
    return f" In {where} measured, {' or '.join(others.unique())} is the fastest."


def _tell_predicted(target: str, rows: pd.DataFrame) -> str:
    private = rows[rows["method"] != BASELINE]
    if private.empty:
        private = rows
    least = least_of(private, "peak_bytes")
    said = (
        f"On {target}, {name_setting(least)} is predicted to peak at "
        f"{significant(least['peak_bytes'], _GIB)} GiB with {least['method']}"
    )
    ratio = least["peak_ratio"]
    if pd.notna(ratio) and least["method"] != BASELINE:
        said += ", as plain training" if is_alike(ratio) else f", {times(ratio)} plain training"
    others = private[private["method"] != least["method"]]
    if len(others):
        sizes = reach(*(significant(others["peak_bytes"].agg(end), _GIB) for end in ENDS))
        named = others["method"].iloc[0] if len(others) == 1 else f"the other {len(others)}"
        said += f", and at {sizes} GiB with {named}"
    sized = rows[rows["target_memory_bytes"].notna()]
    unfit = sized.loc[~find_fitting(sized), "method"] if len(sized) else sized["method"]
    if len(unfit):
        said += f"; {listed(unfit)} {plural(len(unfit), 'does', 'do')} not fit"
    return f"{said}."


def _tell_nothing(runs: pd.DataFrame) -> str:
    """Return that nothing can be told, and why."""
    if runs.empty:
        return "Nothing can be told yet: no planned run has a result."
    if (runs["outcome"] == "ok").any():
        return "No run measured a time or a peak, so there is nothing to compare."
    first = runs.iloc[0]
    return (
        f"Nothing can be told: none of {len(runs):,} {plural(len(runs), 'run')} succeeded "
        f"({count_failures(runs)}). The first, {first['method']}, said: {first['error_message']}"
    )
