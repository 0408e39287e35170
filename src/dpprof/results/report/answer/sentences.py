"""The question of a sweep, in the words of its config, and the answer in a few sentences."""

import operator
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpprof.experiments.config.refusals import INDEPENDENT
from dpprof.results.analysis.advice.ratios import compare_apart, find_spread
from dpprof.results.analysis.selection import (
    TRAINING,
    Tables,
    find_fitting,
    find_here,
    find_predicted,
    find_trainings,
    measured,
)
from dpprof.results.analysis.statistics import NO_DIFFERENCE
from dpprof.results.analysis.tables.axes import BASELINE, name_model, name_speed
from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.report import wording
from dpprof.system.words import listed, plural

_ALIKE = 0.005  # a ratio this near to 1 is 1.00 in two digits
_SAVES = 0.9  # correlated noise is told of where it takes a smaller share of the hours
_OF_NOISE = ("noise_strategy", "execution")  # its steps are no CUDA graphs
_MOST = 3  # the most sentences of an answer
_MOST_NAMED = 3  # more methods, or GPUs, are counted and not named

_MOST_METHODS = 4
_MOST_MODELS = 3
_MOST_LENGTHS = 2
"""A question counts more, and does not name them."""


def ask(tables: Tables) -> str:
    """Return what the sweep asks: which models it trains where, and for which privacy.

    Without results there is no question, and the text is empty.
    """
    runs, trainings = tables["runs"], find_trainings(tables)
    if runs.empty:
        return ""
    if trainings:
        return _ask_for_trainings(trainings, tables["noise"])
    private = [str(method) for method in runs["method"].unique() if method != BASELINE]
    what = _name_places(runs)
    if not private:
        return f"What does it take to train {what} without privacy?"
    if len(private) == 1:
        return f"What does {private[0]} cost where it trains {what}?"
    named = listed(private) if len(private) <= _MOST_METHODS else f"{len(private)} private methods"
    return f"Which of {named} should train {what}, and at what cost?"


def _ask_for_trainings(trainings: Sequence[pd.DataFrame], noise: pd.DataFrame) -> str:
    names = wording.name_trainings(trainings)
    models = {wording.name_trained(rows.iloc[0]) for rows in trainings}
    what = f"{len(models)} {plural(len(models), 'model')} in {len(names)} settings"
    if len(names) <= _MOST_MODELS:  # each may have an "and" or a "with" of its own
        *most, last = sorted(names, key=lambda name: " with " in name)
        what = f"{', '.join(most)}{',' * (len(most) > 1)} or {last}" if most else last
    elif len(names) == len(models):
        what = f"{len(models)} models"
    rows = pd.concat(trainings)
    targets = listed(rows["target"].fillna(wording.THIS_MACHINE).unique())
    if noise.empty:
        return f"How should one train {what} privately on {targets}?"
    hourly = (rows["price"] / rows["gpu_hours"]).dropna().astype(float)
    cost = f", if an hour of any GPU costs {hourly.iloc[0]:.4g}" if len(hourly) else ""
    return (
        f"With which method should one train {what} on {targets}, and at what price for "
        f"{wording.name_tokens(noise.iloc[0])}{cost}?"
    )


def _name_places(runs: pd.DataFrame) -> str:
    """Return what is trained where, targets first; places with the same models become one."""
    places = runs["target"].fillna(wording.THIS_MACHINE)
    where: dict[str, list[str]] = {}
    for place in sorted(places.unique(), key=lambda place: place == wording.THIS_MACHINE):
        where.setdefault(_name_models(runs[places == place]), []).append(f"on {place}")
    *most, last = (f"{models} {listed(named)}" for models, named in where.items())
    return f"{', '.join(most)}, and {last}" if most else last


def _name_models(rows: pd.DataFrame) -> str:
    """Return models with their sizes: ``small at T = 64 to 256``, or ``vit-b16 at 224 px``."""
    named = []
    for name, group in rows.groupby(rows.apply(name_model, axis=1), sort=False):
        images = sorted(set(group["image_size"].dropna()))
        lengths = [f"{length:,}" for length in sorted(set(group["seq_len"]))]
        if images:
            sizes = listed(f"{size:.0f} px" for size in images)
        elif len(lengths) > _MOST_LENGTHS:
            sizes = f"T = {lengths[0]} to {lengths[-1]}"
        else:
            sizes = f"T = {listed(lengths)}"
        named.append(f"{name} at {sizes}")
    return listed(named) if len(named) <= _MOST_MODELS else f"{len(named)} models"


def tell_answer(tables: Tables) -> list[str]:
    """Return the answer in a few sentences: trainings on targets, times here, peaks there.

    Each sentence is about what ``analysis.selection`` chooses. Where nothing succeeded, the answer
    says so, with one of the reasons.
    """
    trainings = find_trainings(tables)
    names = wording.name_trainings(trainings), wording.name_trainings(trainings, "seq_len")
    said = [*map(_tell_training, trainings[:_MOST], *names)]
    here = find_here(tables["experiments"])
    if len(here):
        said.append(_tell_here(here, tables))
    asked = {target for rows in trainings for target in rows["target"]}
    predicted = find_predicted(tables)
    said += [_tell_predicted(name, rows) for name, rows in predicted.items() if name not in asked]
    return [*said[:_MOST], *_tell_mechanism(trainings)] or [_tell_nothing(tables["runs"])]


def _tell_mechanism(trainings: Sequence[pd.DataFrame]) -> list[str]:
    """Say with which correlated noise a training saves most hours, if more than a tenth."""
    if not trainings:
        return []
    rows = pd.concat(trainings, ignore_index=True)
    able = rows[rows["fits"] & rows["gpu_hours"].notna()]
    alike = [able[name].map(str) for name in (*TRAINING, "target") if name not in _OF_NOISE]
    saved = []
    for _, ways in able.groupby(alike) if len(able) else ():
        alone = ways.loc[ways["noise_strategy"] == INDEPENDENT, "gpu_hours"].min()
        best = least_of(ways, "gpu_hours")
        saved.append((best["gpu_hours"] / alone, best))
    ratio, best = min(saved, key=operator.itemgetter(0), default=(1.0, None))
    if best is None or not ratio < _SAVES:
        return []
    said = (
        f"With noise_strategy {best['noise_strategy']}, {best['method']} takes {_times(ratio)} the "
        f"GPU hours of independent noise for {wording.name_trained(best)} on "
        f"{wording.name_gpus(best)}, with as much noise in the sum over steps: what SGD has in its "
        "parameters. AdamW reads single steps, so try it."
    )
    return [said]


def _tell_training(rows: pd.DataFrame, name: str, sized: str) -> str:
    wrong = rows.loc[rows["verdict"] == "wrong", "method"].unique()
    failed = f"; {listed(wrong)} failed verification" if len(wrong) else ""
    able = rows[rows["fits"]]
    if able.empty:
        return f"{_tell_none(rows, sized)}{failed}."
    best = _find_best(able)
    place = rows["target"].map(str) + rows["parallel"].map(str)
    same = rows[place == place[best.name]]
    said = f"For {name} use {best['method']} on {wording.name_gpus(best)}, in microbatches of "
    said += wording.count_batch(best)
    if pd.isna(best["tokens_per_s"]):
        return f"{said}; no time is predicted there{failed}."
    said += _tell_speed(best, same) if pd.isna(best["gpu_hours"]) else _tell_price(best)
    verdict = "verdict" if pd.isna(best["gpu_hours"]) else "cost_verdict"
    close = same[same["fits"] & same["method"].ne(best["method"]) & same[verdict].eq("close")]
    alike = {"fast": [*close["method"]], "cheap": _find_cheap(able, best)}
    for much, others in alike.items():
        if others:
            named = listed(others) if len(others) <= _MOST_NAMED else f"{len(others)} others"
            said += f"; {named} may be as {much}"
    return f"{said}{failed}."


def _tell_none(rows: pd.DataFrame, sized: str) -> str:
    private = rows[rows["private"].astype(bool)]
    where = f"{sized} on {listed(rows['target'].fillna(wording.THIS_MACHINE).unique())}"
    if private.empty:
        return f"The sweep asks about no private method for {where}"
    if private["verdict"].eq("failed").all():
        return f"Every private method of the sweep failed for {where}"
    right = " that computes the right gradient" if private["verdict"].eq("wrong").any() else ""
    return f"No private method of the sweep{right} safely fits {where}"


def _find_best(able: pd.DataFrame) -> Any:
    """Return the option that takes the fewest GPU hours, else fits most.

    Without a budget, that is the one with most tokens per second of a GPU.
    """
    names = ["gpu_hours", "tokens_per_s", "safe_batch_size"]
    order = able[names].astype(float)
    order["tokens_per_s"] /= able["ranks"]
    best_first = order.sort_values(names, ascending=[True, False, False], kind="stable")
    return able.loc[best_first.index[0]]


def _find_cheap(able: pd.DataFrame, best: Any) -> list[str]:
    """Return on which other GPUs the same method may cost as little, by the ratio of prices."""
    others = able[able["method"].eq(best["method"]) & able["target"].ne(best["target"])]
    others = others.dropna(subset=["price"])
    if pd.isna(best["price"]) or others.empty:
        return []
    *spreads, of_best = (
        find_spread(row["gpu_hours_low"], row["gpu_hours_high"])
        for row in (*others.to_dict("records"), best)
    )
    is_close = [
        compare_apart(price / best["price"], spread, of_best).holds_one
        for price, spread in zip(others["price"], spreads, strict=True)
    ]
    cheapest = others[is_close].sort_values("price").drop_duplicates("target")
    return [wording.name_gpus(row) for _, row in cheapest.iterrows()]


def _tell_speed(best: Any, same: pd.DataFrame) -> str:
    said = f" at {wording.rounded(best['tokens_per_s'])} {name_speed([best])}"
    plain = same.loc[same["method"] == BASELINE, "tokens_per_s"].dropna()
    if plain.empty:
        return said
    return f"{said}, {_times(best['tokens_per_s'] / plain.iloc[0])} the speed of plain training"


def _tell_price(best: Any) -> str:
    hours = " to ".join(wording.significant(best[f"gpu_hours_{end}"]) for end in ("low", "high"))
    median = wording.significant(best["gpu_hours"])
    said = f": a predicted {median} GPU hours (90 % interval {hours})"
    if pd.notna(best["price"]):
        said += f" that cost {wording.significant(best['price'])}"
    ratio = best["hours_ratio"]
    if pd.isna(ratio):
        return said
    much = "the same" if _is_alike(ratio) else f"{_times(ratio)} as much"
    return f"{said}, {much} as without privacy"


def _tell_here(rows: pd.DataFrame, tables: Tables) -> str:
    private = rows[rows["method"] != BASELINE]
    where = f"On {wording.THIS_MACHINE}, a step of {wording.name_setting(rows.iloc[0])}"
    timed = private.dropna(subset=["median_step_s"])
    if private.empty:
        return f"{where} {_absolute(rows.iloc[0])} without privacy; no private method succeeded."
    if timed.empty:
        least = least_of(private, "peak_bytes")
        ratio = least["peak_ratio"]
        over = f", {_times(ratio)} plain training" if pd.notna(ratio) else ""
        return f"{where} {_absolute(least)} with {least['method']}{over}; no time was measured."
    fastest = least_of(timed, "median_step_s")
    said = f"{where} {_tell_fastest(fastest)}"
    if len(timed) > 1:
        said += f"; {_tell_rest(timed, fastest, tables)}"
    return f"{said}.{_tell_elsewhere(fastest, tables)}"


def _times(ratio: float) -> str:
    return f"{wording.number(ratio, digits=2)} times"


def _is_alike(ratio: float) -> bool:
    return abs(ratio - 1) < _ALIKE


def _absolute(row: Any) -> str:
    facts = []
    if pd.notna(row["median_step_s"]):
        facts.append(f"takes {wording.number(row['median_step_s'], wording.MS)} ms")
    if pd.notna(row["peak_bytes"]):
        kind = "allocated" if row["peak_kind"] == "allocated" else "resident, libraries included"
        facts.append(f"peaks at {wording.number(row['peak_bytes'], wording.MIB)} MiB {kind}")
    return " and ".join(facts)


def _tell_fastest(row: Any) -> str:
    ratio, method = row["step_ratio"], row["method"]
    if pd.isna(ratio):
        return f"{_absolute(row)} with {method}"
    if row["step_verdict"] == NO_DIFFERENCE:
        said = f"takes no detectably different time with {method} from plain training"
    else:
        interval = wording.span(row["step_ratio_low"], row["step_ratio_high"], digits=2)
        sure = "not replicated" if interval == "-" else f"95 % interval {interval}"
        said = f"takes {_times(ratio)} as long with {method} as without privacy ({sure})"
    peak = row["peak_ratio"]
    if pd.isna(peak):
        return said
    memory = "the same peak memory" if _is_alike(peak) else f"{_times(peak)} the peak memory"
    return f"{said}, at {memory}"


def _tell_rest(timed: pd.DataFrame, fastest: Any, tables: Tables) -> str:
    others = timed[timed["method"] != fastest["method"]]
    count = f"the other {len(others)}" if len(others) > 1 else str(others["method"].iloc[0])
    ratios = others["step_ratio"].dropna().astype(float)
    steps = others["median_step_s"].astype(float) / wording.MS
    figures, unit, digits = (ratios, "times", 2) if len(ratios) else (steps, "ms", 1)
    ends = (wording.number(figures.agg(end), digits=digits) for end in wording.ENDS)
    said = f"{count} {plural(len(others), 'takes', 'take')} {wording.reach(*ends)} {unit}"
    names = wording.rows_in(fastest, tables["settings"])["not_slower"].dropna()
    alike = str(names.iloc[0]).split() if len(names) else []
    if 0 < len(alike) < len(others):
        said += f", of which {listed(alike)} not detectably more"
    peaks = timed["peak_bytes"].dropna().astype(float)
    if peaks.empty or len(set(timed["peak_kind"])) > 1:
        return said
    lowest = timed.loc[peaks.index[peaks / peaks.min() < 1 + _ALIKE]]
    if fastest["method"] in set(lowest["method"]):
        return said
    least = least_of(lowest, "median_step_s")
    ratio, step = least["peak_ratio"], least["step_ratio"]
    if pd.notna(ratio) and pd.notna(step):
        peak = f"{_times(ratio)} plain training's, at {_times(step)} the time"
    else:
        peak = f"{wording.number(least['peak_bytes'], wording.MIB)} MiB"
    return f"{said}, and {least['method']} has the lowest peak, {peak}"


def _tell_elsewhere(fastest: Any, tables: Tables) -> str:
    settings = tables["settings"].dropna(subset=["fastest"])
    if len(settings) < 2 or measured(tables["experiments"]).empty:  # noqa: PLR2004 (one says nothing)
        return ""
    others = settings.loc[settings["fastest"] != fastest["method"], "fastest"]
    if others.empty:
        return f" It is the fastest private method in all {len(settings):,} settings measured."
    where = f"the other {len(others):,} settings" if len(others) > 1 else "the other setting"
    if len(others) + 1 < len(settings):
        where = f"{len(others):,} of the {len(settings):,} settings"
    return f" In {where} measured, {' or '.join(others.unique())} is the fastest."


def _tell_predicted(target: str, rows: pd.DataFrame) -> str:
    private = rows[rows["method"] != BASELINE]
    if private.empty:
        private = rows
    least = least_of(private, "peak_bytes")
    peak = wording.significant(least["peak_bytes"], wording.GIB)
    said = f"On {target}, {wording.name_setting(least)} is predicted to peak at {peak} GiB with "
    said += str(least["method"])
    ratio = least["peak_ratio"]
    if pd.notna(ratio) and least["method"] != BASELINE:
        said += ", as plain training" if _is_alike(ratio) else f", {_times(ratio)} plain training"
    others = private[private["method"] != least["method"]]
    if len(others):
        ends = (others["peak_bytes"].agg(end) for end in wording.ENDS)
        sizes = wording.reach(*(wording.significant(end, wording.GIB) for end in ends))
        named = others["method"].iloc[0] if len(others) == 1 else f"the other {len(others)}"
        said += f", and at {sizes} GiB with {named}"
    sized = rows[rows["target_memory_bytes"].notna()]
    unfit = sized.loc[~find_fitting(sized), "method"]
    if len(unfit):
        said += f"; {listed(unfit)} {plural(len(unfit), 'does', 'do')} not fit"
    return f"{said}."


def _tell_nothing(runs: pd.DataFrame) -> str:
    if runs.empty:
        return "Nothing can be told yet: no planned run has a result."
    if (runs["outcome"] == "ok").any():
        return "No run measured a time or a peak, so there is nothing to compare."
    first = runs.iloc[0]
    return (
        f"Nothing can be told: none of {len(runs):,} {plural(len(runs), 'run')} succeeded "
        f"({wording.count_failures(runs)}). The first, {first['method']}, said: "
        f"{first['error_message']}"
    )
